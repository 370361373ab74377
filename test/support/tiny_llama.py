"""Tiny Llama checkpoints with random weights, and transformers' model of the same weights as the reference."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Variant:
    """A shape of Llama by what it differs in from the base: grouped queries, tied embeddings, plain rope."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("grouped_queries_tied"),
    Variant("one_key_head", {"num_key_value_heads": 1}),
    Variant("no_grouping_untied", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    Variant("wide_heads", {"head_dim": 24}),
    Variant("llama3_rope", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    Variant("linear_rope", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}),
    Variant("biases", {"attention_bias": True, "mlp_bias": True}),
    Variant("three_end_tokens", {"eos_token_id": [2, 7, 11]}),
)
BASE: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough that greedy outputs differ between prompts instead of collapsing to one token.
    "initializer_range": 0.35,
}


def variant(name: str) -> Variant:
    return next(v for v in VARIANTS if v.name == name)


def build_reference(v: Variant, seed: int = 0) -> LlamaForCausalLM:
    """fp32, eval mode. Norms and biases are random too: ones and zeros would hide one that is not applied."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**BASE, **v.changes})
    config._attn_implementation = "eager"
    reference = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return reference


def save_checkpoint(reference: LlamaForCausalLM, directory: Path) -> Path:
    """`config.json` and safetensors, as a user would have them on disk."""
    reference.save_pretrained(directory)
    return directory
