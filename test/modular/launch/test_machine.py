"""Configuration words as the engine of one worker gets them."""

import pytest
import torch
from support.checkpoints import write_directory

from mstar.config.load import ConfigError, config_from_mapping
from mstar.config.schema import DeploymentConfig
from mstar.engine.engine_config import EngineConfig
from mstar.launch.deployment import resolve_deployment
from mstar.launch.machine import (
    WorkerMemory,
    device_executor,
    engine_config,
    step_tokens,
    torch_device,
    torch_dtype,
)
from mstar.launch.rank import checkpoint_fingerprint
from mstar.platforms import current_platform


def _engine_config(directory, tmp_path, **values) -> EngineConfig:
    config = config_from_mapping({"model": "llama", "checkpoint": str(directory), **values}, "f.yaml")
    deployment = resolve_deployment(config, cache_dir=tmp_path)
    return engine_config(
        config,
        deployment.model().get_node_resources(),
        max_seq_len=64,
        capacity=4,
        stored_signals={},
        memory=WorkerMemory(0, 0),
        fingerprint=checkpoint_fingerprint(deployment),
    )


def test_prefixes_are_shared_and_nothing_goes_to_the_host_by_default(tmp_path):
    write_directory(tmp_path / "llama")
    config = _engine_config(tmp_path / "llama", tmp_path)
    assert (config.prefix_cache, config.reuse_generated, config.host_bytes) == (True, False, {})


def test_the_words_arrive(tmp_path):
    write_directory(tmp_path / "llama")
    config = _engine_config(
        tmp_path / "llama",
        tmp_path,
        prefix_cache={"enabled": False, "reuse_generated": True},
        resources={"kv": {"num_pages": 8, "host_bytes": 12345}, "attn": {"host_bytes": 0}},
    )
    assert (config.prefix_cache, config.reuse_generated, config.host_bytes) == (False, True, {"kv": 12345})


def test_another_checkpoint_has_another_fingerprint(tmp_path):
    for name in ("one", "two"):
        write_directory(tmp_path / name)
    one, again, two = (_engine_config(tmp_path / name, tmp_path).fingerprint for name in ("one", "one", "two"))
    assert one == again
    assert "" != one != two


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that torch sees, with 10 GB free; nothing is put there."""
    monkeypatch.setattr(current_platform, "has_accelerator", lambda: True)
    monkeypatch.setattr(current_platform, "device_type", lambda: "cuda")
    monkeypatch.setattr(current_platform, "has_bf16", lambda device_type: device_type == "cuda")
    monkeypatch.setattr(
        current_platform, "free_memory_bytes", lambda device_type: 10**10 if device_type == "cuda" else 1
    )


def test_an_accelerator_is_used_where_there_is_one(tmp_path, accelerator):
    write_directory(tmp_path / "llama")
    config = _engine_config(tmp_path / "llama", tmp_path)
    assert (config.device, config.dtype) == (torch.device("cuda", 0), torch.bfloat16)
    assert (config.resource_bytes, config.cache_share, config.most_cache_bytes) == (10**10, 0.8, None)
    assert config.capture_tokens[0] == 64 and config.capture_tokens[-1] == 8192
    config = _engine_config(tmp_path / "llama", tmp_path, scheduler={"max_step_tokens": 200})
    assert config.capture_tokens == (64, 128, 200)
    config = _engine_config(tmp_path / "llama", tmp_path, capture={"enabled": False})
    assert config.capture_tokens == config.capture_sizes == ()
    config = _engine_config(tmp_path / "llama", tmp_path, device="cpu")
    assert (config.device, config.dtype) == (torch.device("cpu"), torch.float32)
    assert (config.resource_bytes, config.cache_share, config.most_cache_bytes) == (1, 0.25, 4 << 30)
    assert config.capture_tokens == ()


def test_longer_steps_on_an_accelerator(accelerator):
    assert step_tokens(config_from_mapping({"model": "llama"}, "f.yaml")) == 8192
    assert step_tokens(config_from_mapping({"model": "llama", "device": "cpu"}, "f.yaml")) == 2048
    executor, overlap = device_executor(config_from_mapping({"model": "llama"}, "f.yaml"))
    assert type(executor).__name__ == "CudaExecutor" and overlap


def test_without_an_accelerator_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(current_platform, "device_type", lambda: "cpu")
    assert torch_device(config_from_mapping({"model": "llama"}, "f.yaml")).type == "cpu"
    asked = config_from_mapping({"model": "llama", "device": "cuda"}, "f.yaml")
    with pytest.raises(ConfigError, match="torch finds no accelerator"):
        torch_dtype(asked)


# workers that share a device

GIB = 1 << 30


def _left(config: DeploymentConfig, own: int, others: int) -> int:
    sizes = engine_config(config, (), 64, 4, {}, WorkerMemory(own, own + others), "")
    assert sizes.resource_bytes is not None
    return sizes.resource_bytes


def _two_workers() -> DeploymentConfig:
    groups = [{"node_names": [name], "ranks": [rank]} for rank, name in enumerate(("LLM", "Vision"))]
    return config_from_mapping({"model": "qwen3_5", "node_groups": groups}, "f.yaml")


@pytest.mark.parametrize("weights", [(10, 10), (20, 5), (5, 20), (100, 2)])
def test_the_order_in_which_workers_start_does_not_matter(accelerator, monkeypatch, weights):
    config, total = _two_workers(), 138 * GIB
    monkeypatch.setattr(current_platform, "total_memory_bytes", lambda device_type: total)
    found = []
    for order in ((0, 1), (1, 0)):
        free, parts = total, [0, 0]
        for rank in order:
            monkeypatch.setattr(current_platform, "free_memory_bytes", lambda device_type, free=free: free)
            own, other = weights[rank] * GIB, weights[1 - rank] * GIB
            parts[rank] = _left(config, own, other)
            free -= own + parts[rank]
        assert free >= 0
        found.append(parts)
    assert found[0] == found[1] == [(138 - sum(weights)) * GIB // 2] * 2


def test_what_others_use_of_a_shared_device_is_not_planned_with(accelerator, monkeypatch):
    monkeypatch.setattr(current_platform, "total_memory_bytes", lambda device_type: 138 * GIB)
    monkeypatch.setattr(current_platform, "free_memory_bytes", lambda device_type: 30 * GIB)
    assert _left(_two_workers(), 10 * GIB, 5 * GIB) == 20 * GIB


def test_weights_that_do_not_fit_end_the_start(accelerator, monkeypatch):
    monkeypatch.setattr(current_platform, "total_memory_bytes", lambda device_type: 80 * GIB)
    monkeypatch.setattr(current_platform, "free_memory_bytes", lambda device_type: 70 * GIB)
    with pytest.raises(ConfigError, match=r"of the 2 workers.* take 81.00 GiB, and it has 80.00 GiB"):
        _left(_two_workers(), 41 * GIB, 40 * GIB)
    with pytest.raises(ConfigError, match=r"weights take 75.00 GiB, and 70.00 GiB of memory are free"):
        _left(config_from_mapping({"model": "llama"}, "f.yaml"), 75 * GIB, 0)
