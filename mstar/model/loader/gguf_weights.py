"""Tensors of a GGUF file under the names and in the layout of the Hugging Face model. Runs in the worker that loads the
weights (and imports torch)."""

import re
from collections.abc import Iterator

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.gguf_config import ARCHITECTURES, gguf_config
from mstar.model.loader.gguf_header import GgufHeader, GgufTensorEntry

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_IN_CONFIG = {"rope_freqs.weight"}  # a table that the configuration's rope_scaling describes
_PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def hf_names(header: GgufHeader) -> dict[str, GgufTensorEntry]:
    """Every weight by its Hugging Face name, in the order of the file.

    Raises:
        CheckpointError: the architecture is not supported, or a tensor has no known counterpart.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{header.path} holds architecture {architecture!r}, expected {', '.join(ARCHITECTURES)}")
    named: dict[str, GgufTensorEntry] = {}
    unknown = []
    for name, entry in header.tensors.items():
        if name in _IN_CONFIG:
            continue
        match = _LAYER_TENSOR.fullmatch(name)
        if name in _GLOBAL_NAMES:
            named[_GLOBAL_NAMES[name]] = entry
        elif match and match[2] in _LAYER_NAMES:
            named[f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"] = entry
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"{header.path}: tensors without a known meaning: {', '.join(sorted(unknown))}")
    return named


def read_gguf_weights(
    header: GgufHeader, names: list[str], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yields (name, tensor in `dtype`, stored bytes) for each of `names`. One tensor is in memory at a time, quantized
    ones dequantized through fp32."""
    entries = hf_names(header)
    config = gguf_config(header)
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    # Copy-on-write, so that torch gets memory that it may call writable; nothing is ever written.
    data = np.memmap(header.path, mode="c")
    for name in names:
        entry = entries[name]
        tensor = _read_tensor(data, entry).to(dtype)
        projection = name.split(".")[-2]
        if projection in num_heads:
            tensor = unpermute_rotary(tensor, num_heads[projection])
        yield name, tensor, entry.num_bytes


def unpermute_rotary(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of the rows of q and k, whose rope turns neighbouring pairs (0, 1), (2, 3), ... of a
    head: back to the order in which rope turns (0, d/2), (1, d/2 + 1), ...; `rows` is [num_heads * d, ...]."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _read_tensor(data: np.memmap, entry: GgufTensorEntry) -> torch.Tensor:
    stored = data[entry.offset : entry.offset + entry.num_bytes]
    if plain := _PLAIN_TYPES.get(entry.ggml_type):
        return torch.from_numpy(stored).view(plain).reshape(entry.shape)
    block_elements, block_bytes = GGML_QUANT_SIZES[entry.ggml_type]
    rows = stored.reshape(*entry.shape[:-1], entry.shape[-1] // block_elements * block_bytes)
    try:
        return torch.from_numpy(dequantize(rows, entry.ggml_type))
    except NotImplementedError as error:
        raise CheckpointError(f"tensor {entry.name} has an unreadable type: {error}") from error
