"""`mstar serve` on a bare checkpoint, a directory and a .gguf file, in processes; the memory plan before the memory."""

import re
from pathlib import Path

import pytest
import torch
from support.checkpoints import byte_level_bpe, write_gguf
from support.server import READY, running

from mstar.cli.targets import config_for
from mstar.communication.loopback import LoopbackNet
from mstar.communication.messages import PlanRow
from mstar.communication.wire import decode_to_worker
from mstar.launch import rank
from mstar.launch.deployment import resolve_deployment
from mstar.launch.rank import Place, build_rank

PROMPT = [5, 99, 7, 300, 12]
NUM_TOKENS = 12


def greedy(weights) -> str:
    """transformers' continuation of `PROMPT` without a cache."""
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(int(weights(torch.tensor([ids])).logits[0, -1].argmax()))
    return byte_level_bpe().decode(ids[len(PROMPT) :]).rstrip("\ufffd")


@pytest.fixture(params=["directory", "gguf"])
def target(request, checkpoint, weights, tmp_path) -> Path:
    if request.param == "directory":
        return checkpoint
    write_gguf(tmp_path / "tiny.gguf", weights)
    return tmp_path / "tiny.gguf"


def test_a_bare_checkpoint_is_served(target: Path, weights, tmp_path):
    """As `llama` and as itself; the same weights in either form give the same text as transformers."""
    with running([str(target), "--set", "dtype=float32", "--set", "num_threads=1"], tmp_path / "log") as server:
        said = server.log.read_text()
        names = [model["id"] for model in server.client.get("/v1/models").json()["data"]]
        assert names == ["llama", str(target)]
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        for name in names:
            answer = server.client.post("/v1/completions", json={"model": name, **body}).json()
            assert answer["choices"][0]["text"] == greedy(weights)
        messages = [{"role": "user", "content": "Hello"}]
        answer = server.client.post("/v1/chat/completions", json={"model": "llama", "messages": messages})
        assert answer.status_code == 200, answer.text
        assert server.stop() == 0
    assert READY.fullmatch(said.rstrip().splitlines()[-1]), "the ready line is the last one"
    parts = ["Memory plan of worker 0", "weights ", "kv ", "rope ", "total ", "MiB", "Try it:", "mstar is ready"]
    assert [part for part in parts if part not in said] == []
    num_parameters = sum(parameter.numel() for parameter in weights.parameters())
    (stated,) = re.findall(r"weights .* ([\d.,]+) │", said)
    assert float(stated) == pytest.approx(num_parameters * 4 / 2**20, abs=0.051)


def test_the_memory_plan_comes_before_anything_is_loaded(checkpoint, weights, tmp_path, monkeypatch, caplog):
    events: list[str] = []
    rows: list[PlanRow] = []

    def announce(plan) -> None:
        events.append("plan")
        rows.extend(plan)

    def load(*arguments):
        events.append("load")
        return load_nodes(*arguments)

    def assemble(**parts):
        events.append("allocate")
        return assemble_worker(**parts)

    load_nodes, assemble_worker = rank.load_nodes, rank.assemble_worker
    monkeypatch.setattr(rank, "load_nodes", load)
    monkeypatch.setattr(rank, "assemble_worker", assemble)
    config = config_for(str(checkpoint), ["dtype=float32", "resources.kv.num_pages=9", "num_threads=1"])
    deployment = resolve_deployment(config, cache_dir=tmp_path)
    model = deployment.model()
    bus = LoopbackNet().bus("worker", decode_to_worker)
    worker, _ = build_rank(deployment, model, deployment.compile(model), Place("plan"), bus, announce=announce)
    worker.close()
    assert events == ["plan", "load", "allocate"]
    assert caplog.messages == []
    sizes = {row.name: row.num_bytes for row in rows}
    assert set(sizes) == {"weights", "kv", "rope", "sampler"}
    assert sizes["weights"] == sum(parameter.nbytes for parameter in weights.parameters())
    heads = weights.config.num_key_value_heads * weights.config.head_dim
    assert sizes["kv"] == (9 + 1) * 64 * weights.config.num_hidden_layers * 2 * heads * 4
    assert sizes["sampler"] == (256 + 1) * weights.config.vocab_size * 5
    assert sizes["rope"] == 256 * weights.config.head_dim * 4


def test_a_cache_that_is_smaller_than_the_context_is_announced(checkpoint, tmp_path, caplog):
    config = config_for(str(checkpoint), ["resources.kv.num_pages=3", "num_threads=1"])
    deployment = resolve_deployment(config, cache_dir=tmp_path)
    model = deployment.model()
    bus = LoopbackNet().bus("worker", decode_to_worker)
    worker, _ = build_rank(deployment, model, deployment.compile(model), Place("short"), bus)
    worker.close()
    said = "kv holds 192 tokens, fewer than max_seq_len (256): no request can be longer"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", said)]
