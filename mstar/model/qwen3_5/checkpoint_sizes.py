"""The shapes of Qwen3.5 that `mstar make-checkpoint` knows, as the `config.json` of each. No torch.

The shapes from 0.8b on are those of the published models as third parties describe them; nobody checked them against
the official files. The tiny ones have every part of the architecture, in sizes that no two parts share by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ADDED_TOKENS: Mapping[str, bool] = {
    **dict.fromkeys(
        (
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
            *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
            *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
        ),
        True,
    ),
    **dict.fromkeys(
        (
            *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
            *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        ),
        False,
    ),
    **dict.fromkeys(
        (
            *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
            *("<tts_text_bos_single>", "<|audio_pad|>"),
        ),
        True,
    ),
}
"""Tokens after the ordinary ones, in the order of their ids (is it special?)."""


PUBLISHED_TOKENS = 248_044
"""Ordinary tokens of the published vocabulary."""


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """`text` and `vision` (empty: none) are what a size differs in from the published constants below. `num_tokens`
    ordinary tokens come before `ADDED_TOKENS`; the embedding has `vocab_size` rows, some more than there are tokens.
    Images are resized to between `image_pixels`, videos to between `video_pixels` (of all frames together)."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    has_experts: bool = False
    num_tokens: int = PUBLISHED_TOKENS
    vocab_size: int = 248_320
    image_pixels: tuple[int, int] = (65_536, 16_777_216)
    video_pixels: tuple[int, int] = (4_096, 25_165_824)
    sections: tuple[int, int, int] = (11, 11, 10)

    def token_id(self, text: str) -> int:
        """The id of one of `ADDED_TOKENS`."""
        return self.num_tokens + list(ADDED_TOKENS).index(text)

    def config(self) -> dict[str, Any]:
        """`config.json`: of the text model alone where there is no tower."""
        kind = "qwen3_5_moe" if self.has_experts else "qwen3_5"
        text = self._text_config(f"{kind}_text")
        if not self.vision:
            return {"architectures": [_class_name(kind, "ForCausalLM")], **text}
        return {
            "architectures": [_class_name(kind, "ForConditionalGeneration")],
            "model_type": kind,
            "image_token_id": self.token_id("<|image_pad|>"),
            "video_token_id": self.token_id("<|video_pad|>"),
            "vision_start_token_id": self.token_id("<|vision_start|>"),
            "vision_end_token_id": self.token_id("<|vision_end|>"),
            "text_config": text,
            "vision_config": {"model_type": kind, **_VISION, "out_hidden_size": text["hidden_size"], **self.vision},
            "tie_word_embeddings": text["tie_word_embeddings"],
        }

    def _text_config(self, model_type: str) -> dict[str, Any]:
        text = {"model_type": model_type, **_TEXT, "vocab_size": self.vocab_size, **self.text}
        interval = text["full_attention_interval"]
        text["layer_types"] = [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(text["num_hidden_layers"])
        ]
        text["rope_parameters"] = {**_ROPE, "mrope_section": list(self.sections)}
        text["eos_token_id"] = self.token_id("<|endoftext|>")
        return text


def _class_name(kind: str, ending: str) -> str:
    return ("Qwen3_5Moe" if kind.endswith("moe") else "Qwen3_5") + ending


_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
}
_TEXT: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mamba_ssm_dtype": "float32",
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262_144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "tie_word_embeddings": False,
    "use_cache": True,
}
_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
_MIDDLE_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}


def _text(hidden: int, layers: int, heads: tuple[int, int], gdn: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "linear_num_key_heads": gdn[0],
        "linear_num_value_heads": gdn[1],
        **more,
    }


def _tiny(text: Mapping[str, Any], vision: Mapping[str, Any], **more: Any) -> CheckpointSize:
    small = {"head_dim": 64, "full_attention_interval": 3, "max_position_embeddings": 32_768, **text}
    return CheckpointSize(
        small,
        vision,
        num_tokens=980,
        vocab_size=1024,
        image_pixels=(1024, 65_536),
        video_pixels=(2048, 131_072),
        sections=(3, 3, 2),
        **more,
    )


_TINY_TOWER = {"depth": 3, "hidden_size": 48, "intermediate_size": 80, "num_heads": 3, "num_position_embeddings": 64}
_TINY_GDN = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
_EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}

SIZES: Mapping[str, CheckpointSize] = {
    "tiny": _tiny(
        _text(64, 6, (4, 2), (2, 4), intermediate_size=160, tie_word_embeddings=True, **_TINY_GDN), _TINY_TOWER
    ),
    "tiny-moe": _tiny(
        _text(
            *(64, 6, (4, 1), (2, 4)),
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            **_TINY_GDN,
        ),
        _TINY_TOWER,
        has_experts=True,
    ),
    "tiny-text": _tiny(
        _text(64, 6, (4, 2), (4, 4), intermediate_size=160, mtp_num_hidden_layers=0, **_TINY_GDN), vision={}
    ),
    "0.8b": CheckpointSize(
        _text(1024, 24, (8, 2), (16, 16), intermediate_size=3584, tie_word_embeddings=True),
        {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12},
    ),
    "2b": CheckpointSize(
        _text(2048, 24, (8, 2), (16, 16), intermediate_size=6144, tie_word_embeddings=True), _MIDDLE_TOWER
    ),
    "4b": CheckpointSize(
        _text(2560, 32, (16, 4), (16, 32), intermediate_size=9216, tie_word_embeddings=True), _MIDDLE_TOWER
    ),
    "9b": CheckpointSize(_text(4096, 32, (16, 4), (16, 32), intermediate_size=12_288), _VISION),
    "27b": CheckpointSize(_text(5120, 64, (24, 4), (16, 48), intermediate_size=17_408), _VISION),
    "35b-a3b": CheckpointSize(
        _text(2048, 40, (16, 2), (16, 32), shared_expert_intermediate_size=512, **_EXPERTS), _VISION, has_experts=True
    ),
}
"""By the name that `--size` takes."""


def published_config(hub_id: str) -> dict[str, Any] | None:
    """`config.json` of the published checkpoint `hub_id` (a revision may follow), as far as it is known here; None for
    any other."""
    repository = hub_id.partition("@")[0].lower().removesuffix("-base")
    size = SIZES.get(repository.removeprefix("qwen/qwen3.5-")) if repository.startswith("qwen/qwen3.5-") else None
    return None if size is None or size.num_tokens < PUBLISHED_TOKENS else size.config()
