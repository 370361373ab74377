"""What the memory of a worker is planned with: the weights of its own nodes, and those of the others."""

import math

import pytest
from safetensors.torch import load_file

from mstar.config.load import config_from_mapping
from mstar.launch import rank
from mstar.launch.deployment import resolve_deployment
from mstar.launch.machine import WorkerMemory
from mstar.launch.rank import Place
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint


def test_a_worker_plans_with_the_weights_of_its_own_nodes(tmp_path, monkeypatch: pytest.MonkeyPatch):
    write_random_checkpoint("tiny", tmp_path / "checkpoint", seed=0)
    groups = [{"node_names": [name], "ranks": [place]} for place, name in enumerate(("LLM", "Vision"))]
    placed = {"model": "qwen3_5", "checkpoint": str(tmp_path / "checkpoint"), "dtype": "float32", "node_groups": groups}
    deployment = resolve_deployment(config_from_mapping(placed, "f.yaml"), cache_dir=tmp_path)
    model = deployment.model()
    compiled = deployment.compile(model)
    seen: list[WorkerMemory] = []
    engine_config = rank.engine_config

    def watched(*args, **more):
        seen.append(args[5])
        return engine_config(*args, **more)

    monkeypatch.setattr(rank, "engine_config", watched)
    for place in range(2):
        settings = rank._worker_settings(deployment.config, Place("", place), overlap=False)
        _, _, rows = rank._sizes(deployment, model, compiled, settings)
        assert sum(row.num_bytes for row in rows) == seen[place].weight_bytes
    stored = {
        name: math.prod(tensor.shape) * 4
        for file in (tmp_path / "checkpoint").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    tower = sum(size for name, size in stored.items() if name.startswith("model.visual."))
    language = sum(size for name, size in stored.items() if name.startswith("model.language_model."))
    assert 0 < tower < language
    assert seen == [WorkerMemory(language, language + tower), WorkerMemory(tower, language + tower)]
