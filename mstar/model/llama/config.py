"""The facts of a Llama checkpoint, read from its configuration once and checked at start-up. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.engine.spec import RopeScaling


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Names as in `config.json`, except that the rope is resolved: `rotary_dim` entries of each head are rotated."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Raises `ValueError` naming the key for a configuration that this model does not compute."""
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"llama: hidden_act {activation!r} is not supported, only 'silu'")
        num_heads = _need(config, "num_attention_heads")
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"llama: {num_heads} attention heads cannot share {num_kv_heads} key heads evenly")
        head_dim = config.get("head_dim") or _need(config, "hidden_size") // num_heads
        rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
        theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
        eos = config.get("eos_token_id")
        return cls(
            vocab_size=_need(config, "vocab_size"),
            hidden_size=_need(config, "hidden_size"),
            intermediate_size=_need(config, "intermediate_size"),
            num_layers=_need(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(_need(config, "rms_norm_eps")),
            rotary_dim=int(head_dim * float(config.get("partial_rotary_factor") or 1.0)),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope, config),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        )


def _need(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(f"llama: the checkpoint's configuration has no {key}")
    return value


def _rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(
                rope.get("original_max_position_embeddings") or _need(config, "max_position_embeddings")
            ),
        )
    raise ValueError(f"llama: rope scaling {kind!r} is not supported, only 'default', 'linear' and 'llama3'")
