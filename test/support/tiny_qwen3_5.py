"""Tiny Qwen3.5 checkpoints with random weights, and transformers' model of the same weights as the reference."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)


@dataclass(frozen=True)
class Variant:
    """A shape of Qwen3.5 by what it differs in from the base."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    moe: bool = False
    vision: bool = False


BASE: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 300.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 48,
}
MEDIA = {"image_token_id": 140, "video_token_id": 141, "vision_start_token_id": 142, "vision_end_token_id": 143}

VARIANTS = (
    Variant("dense"),
    Variant("as_many_value_heads_tied", {"linear_num_value_heads": 2, "tie_word_embeddings": True}),
    Variant("other_order_and_kernel", {"layer_types": ["full_attention", "linear_attention"] * 3,
                                       "linear_conv_kernel_dim": 3, "num_key_value_heads": 1}),
    Variant("biases_no_grouping", {"attention_bias": True, "num_key_value_heads": 4, "linear_value_head_dim": 16}),
    Variant("experts", EXPERTS, moe=True),
    Variant("experts_tied_one_chosen", {**EXPERTS, "num_experts_per_tok": 1, "tie_word_embeddings": True}, moe=True),
    Variant("with_tower_tied", {"tie_word_embeddings": True}, vision=True),
    Variant("experts_with_tower", EXPERTS, moe=True, vision=True),
)  # fmt: skip


def variant(name: str) -> Variant:
    return next(v for v in VARIANTS if v.name == name)


def build_reference(v: Variant, seed: int = 0) -> PreTrainedModel:
    """fp32, eval mode. Whatever begins as zeros or ones is random: it would hide what is not applied."""
    torch.manual_seed(seed)
    text = {**BASE, **v.changes}
    if v.vision:
        config_class, model_class = (
            (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)
            if v.moe
            else (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
        )
        config = config_class(
            text_config=text, vision_config=VISION, **MEDIA, tie_word_embeddings=text["tie_word_embeddings"]
        )
    else:
        config_class, model_class = (
            (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM) if v.moe else (Qwen3_5TextConfig, Qwen3_5ForCausalLM)
        )
        config = config_class(**text)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("linear_attn.norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith(("norm.weight", "layernorm.weight")):
                parameter.copy_(0.3 * noise)  # scaled by one more than this
            elif name.endswith("A_log"):
                parameter.copy_(0.7 * noise)
            elif name.endswith("dt_bias"):
                parameter.copy_(noise - 2)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("mlp.gate.weight"):
                parameter.copy_(0.5 * noise)
            elif "mlp.experts." in name or name.endswith("conv1d.weight"):
                parameter.copy_(0.3 * noise)
    return model


def save_checkpoint(reference: PreTrainedModel, directory: Path) -> Path:
    """`config.json` and safetensors, as a user would have them on disk."""
    reference.save_pretrained(directory)
    return directory
