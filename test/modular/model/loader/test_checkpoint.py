import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.checkpoints import tiny_llama, write_directory, write_gguf
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mstar.model.loader.checkpoint import ResolvedCheckpoint, resolve_checkpoint
from mstar.model.loader.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _resolve(path: Path) -> ResolvedCheckpoint:
    return resolve_checkpoint(str(path), cache_dir=Path("/nonexistent"))


def test_a_directory(tmp_path: Path):
    model = write_directory(tmp_path / "model")
    checkpoint = _resolve(tmp_path / "model")
    shards = list((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 3
    assert checkpoint.kind == "safetensors"
    assert checkpoint.num_bytes == sum(shard.stat().st_size for shard in shards)
    config = checkpoint.config()
    assert LlamaConfig(**config).to_dict() == model.config.to_dict()
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] is None


def test_rope_scaling_is_spelled_out_in_both_writings(tmp_path: Path):
    write_directory(tmp_path / "new", tiny_llama(rope_parameters=LLAMA3))
    new = _resolve(tmp_path / "new").config()
    assert new["rope_theta"] == 500000.0
    assert new["rope_scaling"] == {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    path = tmp_path / "new" / "config.json"
    old = json.loads(path.read_text())
    del old["rope_parameters"]
    old |= {"rope_theta": new["rope_theta"], "rope_scaling": new["rope_scaling"]}
    path.write_text(json.dumps(old))
    assert _resolve(tmp_path / "new").config() == old


def test_nested_text_config_is_spelled_out_too(tmp_path: Path):
    write_directory(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "outer", "text_config": config, "eos_token_id": None}))
    checkpoint = _resolve(tmp_path / "m")
    assert checkpoint.config()["text_config"]["rope_theta"] == 5000.0
    (tmp_path / "m" / "generation_config.json").unlink()
    assert checkpoint.generation_config()["eos_token_id"] == [2]


def test_a_gguf_file_gives_the_configuration_that_the_model_had(tmp_path: Path):
    model = write_gguf(tmp_path / "m.gguf")
    checkpoint = _resolve(tmp_path / "m.gguf")
    config = checkpoint.config()
    expected = {name: value for name, value in model.config.to_dict().items() if name in config}
    changed = {"pad_token_id": 0, "architectures": ["LlamaForCausalLM"]}
    assert {name: config[name] for name in expected} == expected | changed
    assert {"vocab_size", "head_dim", "rms_norm_eps", "intermediate_size", "tie_word_embeddings"} <= expected.keys()
    assert config["rope_theta"] == 5000.0
    assert LlamaConfig(**config).rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())


def test_a_gguf_file_without_output_has_tied_embeddings(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", tiny_llama(tie_word_embeddings=True))
    assert _resolve(tmp_path / "m.gguf").config()["tie_word_embeddings"] is True


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_gguf_rope_scaling_by_metadata(tmp_path: Path, kind: str):
    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    write_gguf(tmp_path / "m.gguf", extra=scaled)
    scaling = _resolve(tmp_path / "m.gguf").config()["rope_scaling"]
    more = {"original_max_position_embeddings": 64} if kind == "yarn" else {}
    assert scaling == {"rope_type": kind, "factor": 4.0, **more}


def _with_divisors(path: Path, divisors: np.ndarray) -> None:
    write_gguf(
        path,
        tiny_llama(head_dim=128, rope_parameters=LLAMA3),
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32)),
    )


def test_gguf_llama3_scaling_is_recovered_from_its_table(tmp_path: Path):
    config = tiny_llama(head_dim=128, rope_parameters=LLAMA3).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / LLAMA3["rope_theta"] ** (np.arange(0, 128, 2) / 128)
    divisors = plain / scaled.numpy()
    assert divisors.min() == pytest.approx(1)
    assert divisors.max() == pytest.approx(32)
    assert np.sum((divisors > 1.01) & (divisors < 31.9)) > 3, "no frequency in the blended range"
    _with_divisors(tmp_path / "m.gguf", divisors)
    found = _resolve(tmp_path / "m.gguf").config()
    assert {**found["rope_scaling"], "rope_theta": found["rope_theta"]} == LLAMA3
    divisors[40] *= 1.01
    _with_divisors(tmp_path / "odd.gguf", divisors)
    with pytest.raises(CheckpointError, match="not the published Llama 3 scaling"):
        _resolve(tmp_path / "odd.gguf").config()


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        (lambda writer: writer.add_expert_count(8), "mixture of experts"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope scaling 'longrope'"),
    ],
)
def test_gguf_files_that_this_reader_does_not_know_are_refused(tmp_path: Path, extra, part: str):
    write_gguf(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(CheckpointError, match=part):
        _resolve(tmp_path / "m.gguf").config()


def test_another_gguf_architecture_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'mamba'; GGUF files are read for llama"):
        _resolve(tmp_path / "m.gguf").config()


def test_generation_config_of_a_directory_wins_over_config(tmp_path: Path):
    write_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.6}))
    found = _resolve(tmp_path).generation_config()
    assert found == {"eos_token_id": [2, 0], "temperature": 0.6, "bos_token_id": 1, "pad_token_id": None}


def test_generation_config_of_a_gguf_file_lists_every_end(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", extra=lambda writer: writer.add_eot_token_id(7))
    assert _resolve(tmp_path / "m.gguf").generation_config() == {
        "eos_token_id": [2, 7],
        "bos_token_id": 1,
        "pad_token_id": 0,
    }


def test_fingerprint_follows_the_weights(tmp_path: Path):
    write_directory(tmp_path / "a")
    checkpoint = _resolve(tmp_path / "a")
    before = checkpoint.fingerprint()
    assert checkpoint.fingerprint() == before
    shard = next((tmp_path / "a").glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    touched = checkpoint.fingerprint()
    assert touched != before
    config = tmp_path / "a" / "config.json"
    config.write_text(config.read_text() + " ")
    assert checkpoint.fingerprint() != touched
    write_gguf(tmp_path / "b.gguf")
    gguf_before = _resolve(tmp_path / "b.gguf").fingerprint()
    os.utime(tmp_path / "b.gguf", ns=(1, 1))
    assert _resolve(tmp_path / "b.gguf").fingerprint() != gguf_before


def test_directories_that_are_not_checkpoints_say_what_they_hold(tmp_path: Path):
    with pytest.raises(CheckpointError, match="it has: nothing"):
        _resolve(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"it has: model.gguf\).*path of the .gguf file"):
        _resolve(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path):
    write_directory(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        _resolve(tmp_path)


def test_a_missing_or_damaged_config_is_named(tmp_path: Path):
    write_directory(tmp_path)
    checkpoint = _resolve(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        checkpoint.config()
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json"):
        _resolve(tmp_path)


def test_a_second_copy_in_another_layout_is_left_out(tmp_path: Path):
    write_directory(tmp_path, max_shard_size="1GB")
    size = _resolve(tmp_path).num_bytes
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(100))
    assert _resolve(tmp_path).num_bytes == size
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert _resolve(tmp_path).num_bytes == size
