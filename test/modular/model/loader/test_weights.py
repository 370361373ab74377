import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.checkpoints import tiny_llama, write_directory, write_gguf
from transformers import LlamaForCausalLM
from transformers.integrations.gguf.dequant import dequantize as torch_dequantize

from mstar.model.loader.checkpoint import ResolvedCheckpoint, resolve_checkpoint
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.gguf_header import GgufTensorEntry
from mstar.model.loader.gguf_weights import _read_tensor
from mstar.model.loader.weights import iter_weights, weight_names

TYPES = gguf.GGMLQuantizationType


def _resolve(path: Path) -> ResolvedCheckpoint:
    return resolve_checkpoint(str(path), cache_dir=Path("/nonexistent"))


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResolvedCheckpoint, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("weights")
    model = write_directory(path)
    return _resolve(path), model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_give_every_weight_in_the_wanted_type(directory, dtype: torch.dtype):
    checkpoint, model = directory
    expected = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    _assert_equal(dict(iter_weights(checkpoint, dtype=dtype)), expected)
    assert sorted(weight_names(checkpoint)) == sorted(expected)


def test_a_single_file_without_index(tmp_path: Path):
    model = write_directory(tmp_path, max_shard_size="1GB")
    assert not (tmp_path / "model.safetensors.index.json").exists()
    _assert_equal(dict(iter_weights(_resolve(tmp_path), dtype=torch.float32)), model.state_dict())


def test_integers_keep_their_type(tmp_path: Path):
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    save_file({"ids": torch.arange(5), "w": torch.ones(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    found = dict(iter_weights(_resolve(tmp_path), dtype=torch.bfloat16))
    assert found["ids"].dtype == torch.int64
    assert found["w"].dtype == torch.bfloat16


def test_as_stored_nothing_is_converted(tmp_path: Path):
    from safetensors.torch import save_file

    stored = {"wide": torch.tensor([1.0 + 2**-20]), "narrow": torch.tensor([1.5], dtype=torch.bfloat16)}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    found = dict(iter_weights(_resolve(tmp_path), dtype=None))
    assert {name: tensor.dtype for name, tensor in found.items()} == {"wide": torch.float32, "narrow": torch.bfloat16}
    _assert_equal(found, stored)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_selected_names_and_the_bytes_they_count(tmp_path: Path, kind: str):
    path = tmp_path / ("m.gguf" if kind == "gguf" else "m")
    model = (write_gguf if kind == "gguf" else write_directory)(path)
    checkpoint = _resolve(path)
    wanted = {"model.norm.weight", "model.layers.1.mlp.down_proj.weight"}
    for names in (wanted, sorted(wanted), lambda name: name in wanted):
        reports: list[tuple[str, int, int | None]] = []
        found = dict(
            iter_weights(checkpoint, dtype=torch.float32, names=names, progress=lambda *r, to=reports: to.append(r))
        )
        _assert_equal(found, {name: model.state_dict()[name] for name in wanted})
        num_bytes = sum(tensor.nbytes for tensor in found.values())
        assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
        assert reports[0][1:] == (0, num_bytes)
        assert reports[-1][1:] == (num_bytes, num_bytes)
    with pytest.raises(CheckpointError, match=r"no weights lm_tail\.weight"):
        list(iter_weights(checkpoint, dtype=torch.float32, names=["lm_tail.weight", "lm_head.weight"]))


def test_tensors_that_are_packed_together_come_together(directory):
    checkpoint, _ = directory
    names = [name for name, _ in iter_weights(checkpoint, dtype=torch.float32) if "layers.0.mlp" in name]
    gate, up = (names.index(f"model.layers.0.mlp.{part}_proj.weight") for part in ("gate", "up"))
    assert abs(gate - up) == 1


def test_a_name_in_two_files_is_an_error(tmp_path: Path):
    write_directory(tmp_path, max_shard_size="1GB")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is both in a.safetensors and in b.safetensors"):
        list(iter_weights(_resolve(tmp_path), dtype=torch.float32))


def test_a_truncated_shard_is_named(tmp_path: Path):
    write_directory(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is not a complete safetensors file"):
        list(iter_weights(_resolve(tmp_path), dtype=torch.float32))


def _round_trip(rows: np.ndarray, kind: TYPES) -> torch.Tensor:
    """What remains of `rows` after quantization, by transformers' own decoder."""
    stored = gguf.quants.quantize(rows, kind)
    if kind in (TYPES.F32, TYPES.F16):
        return torch.from_numpy(stored.copy()).float()
    if kind == TYPES.BF16:
        return torch.from_numpy(rows.copy()).bfloat16().float()
    return torch_dequantize(torch.from_numpy(stored.copy()), int(kind)).reshape(rows.shape)


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_1, TYPES.Q4_0])
def test_gguf_tensors_are_dequantized_and_their_rows_put_back(tmp_path: Path, kind: TYPES):
    """Quantization works along rows, so permuting them before or after it is the same."""
    model = write_gguf(tmp_path / "m.gguf", tensor_type=lambda name: kind)
    found = dict(iter_weights(_resolve(tmp_path / "m.gguf"), dtype=torch.float32))
    expected = {
        name: _round_trip(tensor.numpy(), kind) if tensor.ndim == 2 else tensor
        for name, tensor in model.state_dict().items()
    }
    _assert_equal(found, expected)


def test_gguf_weights_equal_the_loader_of_transformers(tmp_path: Path):
    mixed = {"token_embd.weight": TYPES.Q8_0, "output.weight": TYPES.F16}
    write_gguf(tmp_path / "m.gguf", tensor_type=lambda name: mixed.get(name, TYPES.Q4_1))
    reference = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    found = dict(iter_weights(_resolve(tmp_path / "m.gguf"), dtype=torch.float32))
    _assert_equal(found, reference.state_dict())


def test_gguf_biases_of_q_and_k_are_put_back_too(tmp_path: Path):
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.uniform_(-1, 1)
    write_gguf(tmp_path / "m.gguf", model)
    checkpoint = _resolve(tmp_path / "m.gguf")
    _assert_equal(dict(iter_weights(checkpoint, dtype=torch.float32)), model.state_dict())
    assert checkpoint.config()["attention_bias"] is True
    assert checkpoint.config()["mlp_bias"] is True


@pytest.mark.parametrize("kind", [TYPES.Q2_K, TYPES.Q3_K, TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K, TYPES.IQ4_NL])
def test_other_block_types_equal_the_decoder_of_transformers(kind: TYPES):
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (6, block_bytes), dtype=np.uint8)
    scale_offsets = {TYPES.Q2_K: [80, 82], TYPES.Q3_K: [108], TYPES.Q4_K: [0, 2], TYPES.Q5_K: [0, 2], TYPES.Q6_K: [208]}
    for offset in scale_offsets.get(kind, [0]):  # random bytes would also be NaN and infinite scales
        blocks[:, offset : offset + 2] = rng.uniform(0.01, 0.1, (6, 1)).astype(np.float16).view(np.uint8)
    entry = GgufTensorEntry("t", (3, 2 * elements), kind, 0, blocks.nbytes)
    found = _read_tensor(blocks.reshape(-1), entry)
    expected = torch_dequantize(torch.from_numpy(blocks.reshape(3, -1).copy()), int(kind)).reshape(3, -1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert found.abs().max() > 0


def test_a_tensor_without_a_known_meaning_is_an_error(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", extra=lambda w: w.add_tensor("blk.0.ffn_extra.weight", np.zeros(4, np.float32)))
    with pytest.raises(CheckpointError, match=r"without a known meaning: blk.0.ffn_extra.weight"):
        list(iter_weights(_resolve(tmp_path / "m.gguf"), dtype=torch.float32))


def test_reading_leaves_the_file_as_it_was(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf")
    before = (tmp_path / "m.gguf").read_bytes()
    for _, tensor in iter_weights(_resolve(tmp_path / "m.gguf"), dtype=torch.float32):
        tensor.fill_(7.0)
    assert (tmp_path / "m.gguf").read_bytes() == before
