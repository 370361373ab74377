"""The model configuration that GGUF metadata implies, under the names that a Hugging Face `config.json` uses. No torch;
any process."""

import math
import struct
from typing import Any

import numpy as np

from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.gguf_header import GgufHeader

ARCHITECTURES = ("llama",)
# The constants that every published Llama 3.x checkpoint has; llama.cpp stores only what follows from them.
_LLAMA3_LOW_FREQ, _LLAMA3_HIGH_FREQ, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """`config.json` keys of a llama checkpoint, and `rope_theta` / `rope_scaling` at the top level.

    Raises:
        CheckpointError: another architecture, a mixture of experts, a missing key, or a rope scaling that has no name.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} holds architecture {architecture!r}; GGUF files are read for {', '.join(ARCHITECTURES)}"
        )
    if metadata.get(f"{architecture}.expert_count", 0):
        raise CheckpointError(f"{header.path} holds a mixture of experts, which is not read from GGUF files")

    def need(key: str) -> Any:
        value = metadata.get(f"{architecture}.{key}")
        if value is None or isinstance(value, list):
            raise CheckpointError(f"{header.path}: metadata {architecture}.{key} is {value!r}, expected one number")
        return value

    hidden_size, num_heads = need("embedding_length"), need("attention.head_count")
    num_kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", num_heads)
    if isinstance(num_kv_heads, list):
        raise CheckpointError(f"{header.path} has another number of key heads in each layer, which is not supported")
    head_dim = metadata.get(f"{architecture}.attention.key_length", hidden_size // num_heads)
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{header.path} has no tensor token_embd.weight; is it a whole model?")
    theta = _short_float(metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    config = {
        "model_type": architecture,
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _short_float(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, architecture, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    rotary_dim = metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    return config


def gguf_eos_ids(header: GgufHeader) -> list[int]:
    """Ids that end a generation by the metadata: end of sequence, of a turn, of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (header.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(token for token in found if token is not None))


def _short_float(value: float) -> float:
    """The shortest decimal of the same float32: metadata says 9.999999747378752e-06 where config.json said 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(header: GgufHeader, architecture: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, theta, head_dim)
    metadata = header.metadata
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = metadata.get(f"{architecture}.rope.scaling.factor", metadata.get(f"{architecture}.rope.scale_linear"))
    if kind == "none" and factor in (None, 0.0, 1.0):
        return None
    if kind in ("linear", "none") and factor:
        return {"rope_type": "linear", "factor": _short_float(factor)}
    context = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    if kind == "yarn" and factor and context:
        return {"rope_type": "yarn", "factor": _short_float(factor), "original_max_position_embeddings": context}
    raise CheckpointError(f"{header.path}: rope scaling {kind!r} with factor {factor} is not supported")


def _llama3_scaling(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3 scaling is stored as one divisor per frequency. The parameters are recovered by trying the published ones
    with the largest divisor as factor, and accepted only if they give the stored divisors back."""
    entry = header.tensors["rope_freqs.weight"]
    with header.path.open("rb") as file:
        file.seek(entry.offset)
        stored = struct.unpack(f"<{head_dim // 2}f", file.read(2 * head_dim))
    scaling = {
        "rope_type": "llama3",
        "factor": round(max(stored), 3),
        "low_freq_factor": _LLAMA3_LOW_FREQ,
        "high_freq_factor": _LLAMA3_HIGH_FREQ,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    expected = llama3_divisors(theta, head_dim, scaling["factor"])
    if any(abs(a - b) > 1e-3 * b for a, b in zip(stored, expected, strict=True)):
        raise CheckpointError(f"{header.path}: rope_freqs.weight is not the published Llama 3 scaling: {stored}")
    return scaling


def llama3_divisors(theta: float, head_dim: int, factor: float) -> list[float]:
    """What Llama 3's rope scaling divides each of the `head_dim // 2` frequencies by: 1 for wavelengths well inside the
    original context, `factor` for those beyond it, and in between the inverse of a linear blend of 1 and 1/factor."""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        blend = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW_FREQ) / (_LLAMA3_HIGH_FREQ - _LLAMA3_LOW_FREQ)
        blend = min(1.0, max(0.0, blend))
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors
