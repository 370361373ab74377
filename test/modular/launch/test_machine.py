"""Configuration words as the engine of one worker gets them."""

from support.checkpoints import write_directory

from mstar.config.load import config_from_mapping
from mstar.engine.engine_config import EngineConfig
from mstar.launch.deployment import resolve_deployment
from mstar.launch.machine import engine_config
from mstar.launch.rank import checkpoint_fingerprint


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
