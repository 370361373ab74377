"""Configuration words as the engine of one worker gets them."""

import pytest
import torch
from support.checkpoints import write_directory

from mstar.config.load import ConfigError, config_from_mapping
from mstar.engine.engine_config import EngineConfig
from mstar.launch.deployment import resolve_deployment
from mstar.launch.machine import device_executor, engine_config, step_tokens, torch_device, torch_dtype
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
        weight_bytes=0,
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
    assert config.resource_bytes == 8 * 10**9
    assert config.capture_tokens[0] == 64 and config.capture_tokens[-1] == 8192
    config = _engine_config(tmp_path / "llama", tmp_path, scheduler={"max_step_tokens": 200})
    assert config.capture_tokens == (64, 128, 200)
    config = _engine_config(tmp_path / "llama", tmp_path, capture={"enabled": False})
    assert config.capture_tokens == config.capture_sizes == ()
    config = _engine_config(tmp_path / "llama", tmp_path, device="cpu")
    assert (config.device, config.dtype) == (torch.device("cpu"), torch.float32)
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
