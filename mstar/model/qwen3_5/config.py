"""The facts of a Qwen3.5 checkpoint, read from its configuration once and checked at start-up. No torch.

One family in several shapes: a language model alone (`Qwen3_5ForCausalLM`), or with a vision tower
(`Qwen3_5ForConditionalGeneration`), each dense or with experts. The published configurations say more than is read
here; what they say that this package does not compute is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """`num_chosen` of `num_experts` of width `expert_width` per token, beside one of `shared_width` for all."""

    num_experts: int
    num_chosen: int
    expert_width: int
    shared_width: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower. A patch is `temporal_patch_size` frames of `patch_size` squared; `spatial_merge_size` squared
    patches become one feature of width `out_hidden_size`. The learned position grid has `grid_side` squared entries."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    grid_side: int
    hidden_act: str
    rope_theta: float


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Ids of the tokens that stand for media in a prompt, and of those around them."""

    image: int
    video: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True, slots=True)
class Qwen35Config:
    """`layer_types` has `LINEAR` or `FULL` per layer. Of each head `rotary_dim` entries are rotated; `sections` says
    how many frequencies follow the temporal, vertical and horizontal position of a token. `intermediate_size` is that
    of the dense feed-forward layers (0 with `experts`). `vision` and `media` come together."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary_dim: int
    rope_theta: float
    sections: tuple[int, int, int]
    attention_bias: bool
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    experts: ExpertsConfig | None
    vision: VisionConfig | None
    media: MediaTokens | None

    @property
    def num_full_layers(self) -> int:
        return self.layer_types.count(FULL)

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count(LINEAR)

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values of linear attention, which the convolution runs over."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Qwen35Config:
        """Raises `ValueError` naming the key for a configuration that this model does not compute."""
        text: Mapping[str, Any] = config.get("text_config") or config
        _refuse_what_is_not_computed(text)
        num_heads = _need(text, "num_attention_heads")
        num_kv_heads = text.get("num_key_value_heads") or num_heads
        num_key_heads, num_value_heads = _need(text, "linear_num_key_heads"), _need(text, "linear_num_value_heads")
        for many, few, what in (
            (num_heads, num_kv_heads, "attention heads cannot share {} key heads"),
            (num_value_heads, num_key_heads, "value heads of linear attention cannot share {} key heads"),
        ):
            if many % few:
                raise ValueError(f"qwen3_5: {many} {what.format(few)} evenly")
        head_dim = text.get("head_dim") or _need(text, "hidden_size") // num_heads
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        rotated = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 0.25
        experts = _experts(text)
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        eos = text.get("eos_token_id", config.get("eos_token_id"))
        vision = _vision(config.get("vision_config"))
        return cls(
            vocab_size=_need(text, "vocab_size"),
            hidden_size=_need(text, "hidden_size"),
            intermediate_size=0 if experts else _need(text, "intermediate_size"),
            layer_types=_layer_types(text),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(_need(text, "rms_norm_eps")),
            rotary_dim=int(head_dim * float(rotated)),
            rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0),
            sections=_sections(rope),
            attention_bias=bool(text.get("attention_bias", False)),
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=_need(text, "linear_key_head_dim"),
            value_dim=_need(text, "linear_value_head_dim"),
            conv_kernel=_need(text, "linear_conv_kernel_dim"),
            tie_word_embeddings=bool(tied),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            experts=experts,
            vision=vision,
            media=None if vision is None else _media_tokens(config),
        )


def _need(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(f"qwen3_5: the checkpoint's configuration has no {key}")
    return value


def _refuse_what_is_not_computed(text: Mapping[str, Any]) -> None:
    activation = text.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"qwen3_5: hidden_act {activation!r} is not supported, only 'silu'")
    if not text.get("attn_output_gate", True):
        raise ValueError("qwen3_5: attn_output_gate false is not supported: attention is gated")
    if text.get("mlp_only_layers"):
        raise ValueError("qwen3_5: mlp_only_layers is not supported: either all layers have experts or none has")


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    num_layers = _need(text, "num_hidden_layers")
    kinds = text.get("layer_types")
    if kinds is None:
        interval = text.get("full_attention_interval") or 4
        kinds = [LINEAR if (index + 1) % interval else FULL for index in range(num_layers)]
    if len(kinds) != num_layers:
        raise ValueError(f"qwen3_5: layer_types names {len(kinds)} layers, and num_hidden_layers is {num_layers}")
    if unknown := set(kinds).difference((LINEAR, FULL)):
        raise ValueError(f"qwen3_5: layer_types {sorted(unknown)} are not supported, only {LINEAR!r} and {FULL!r}")
    if len(set(kinds)) == 1:
        raise ValueError(f"qwen3_5: layer_types has {kinds[0]!r} only; the model mixes both kinds")
    return tuple(kinds)


def _sections(rope: Mapping[str, Any]) -> tuple[int, int, int]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"qwen3_5: rope type {kind!r} is not supported, only 'default'")
    if not rope.get("mrope_interleaved", True):
        raise ValueError("qwen3_5: mrope_interleaved false is not supported")
    sections = tuple(rope.get("mrope_section") or (11, 11, 10))
    if len(sections) != 3:
        raise ValueError(f"qwen3_5: mrope_section has {len(sections)} entries, not 3")
    return sections


def _experts(text: Mapping[str, Any]) -> ExpertsConfig | None:
    if not text.get("num_experts"):
        return None
    return ExpertsConfig(
        num_experts=_need(text, "num_experts"),
        num_chosen=_need(text, "num_experts_per_tok"),
        expert_width=_need(text, "moe_intermediate_size"),
        shared_width=_need(text, "shared_expert_intermediate_size"),
    )


def _vision(vision: Mapping[str, Any] | None) -> VisionConfig | None:
    if vision is None:
        return None
    if vision.get("deepstack_visual_indexes"):
        raise ValueError("qwen3_5: deepstack_visual_indexes is not supported")
    num_positions = _need(vision, "num_position_embeddings")
    side = round(num_positions**0.5)
    if side * side != num_positions:
        raise ValueError(f"qwen3_5: num_position_embeddings {num_positions} is not a square")
    return VisionConfig(
        depth=_need(vision, "depth"),
        hidden_size=_need(vision, "hidden_size"),
        intermediate_size=_need(vision, "intermediate_size"),
        num_heads=_need(vision, "num_heads"),
        in_channels=vision.get("in_channels") or 3,
        patch_size=_one(vision, "patch_size"),
        temporal_patch_size=_one(vision, "temporal_patch_size"),
        spatial_merge_size=_need(vision, "spatial_merge_size"),
        out_hidden_size=_need(vision, "out_hidden_size"),
        grid_side=side,
        hidden_act=vision.get("hidden_act") or "gelu_pytorch_tanh",
        rope_theta=float((vision.get("rope_parameters") or {}).get("rope_theta") or 10000.0),
    )


def _one(vision: Mapping[str, Any], key: str) -> int:
    """A size that may be given once or per dimension."""
    value = _need(vision, key)
    if isinstance(value, int):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"qwen3_5: {key} {list(value)} is not supported: sides differ")
    return value[0]


def _media_tokens(config: Mapping[str, Any]) -> MediaTokens:
    return MediaTokens(
        image=_need(config, "image_token_id"),
        video=_need(config, "video_token_id"),
        vision_start=_need(config, "vision_start_token_id"),
        vision_end=_need(config, "vision_end_token_id"),
    )
