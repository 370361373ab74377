"""A dense model in the shape of Qwen3-0.6B with random weights, for measuring without a checkpoint: a Llama whose
queries and keys are normed head by head.

Not for talking to: `model: benchmark.random_qwen3:CARD` in a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmark.random_llama import draw_weights
from mstar.engine.submodule import NodeSubmodule
from mstar.kernels.fused_norms import AddNorm, HeadNorms
from mstar.layers.attention import SelfAttention
from mstar.layers.linear import pack_weights
from mstar.layers.norm import RMSNorm
from mstar.model.base import ModelCard, ModelSetup
from mstar.model.llama.config import LlamaConfig
from mstar.model.llama.model import LlamaModel
from mstar.model.llama.network import LlamaLayer, LlamaNetwork
from mstar.model.llama.submodules import LlamaSubmodule
from mstar.model.submodule_context import SubmoduleContext

SHAPE: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}


class RandomQwen3Model(LlamaModel):
    """The declarations of `SHAPE`, whatever the deployment's checkpoint."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(ModelSetup(SHAPE, tokenizer_dir=None, max_seq_len=setup.max_seq_len))


class NormedAttention(SelfAttention):
    """Self-attention with a norm of each query and key head before its rotation."""

    def __init__(self, index: int, c: LlamaConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(
            index,
            hidden_size=c.hidden_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
            attn_key="attn",
            pos_key="rope",
            dtype=dtype,
            device=device,
        )
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=dtype, device=device)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, then: AddNorm | None = None) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`. `then`: see `Linear.forward_then`."""
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, zero_centered=False)
        return self.o_proj.forward_then(self.attend(self.qkv_proj(x), norms), then)


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    """Weights of a fixed seed, small enough that nothing overflows."""
    config = LlamaConfig.from_mapping(SHAPE)
    network = LlamaNetwork(config, dtype=context.dtype, device=context.device)
    for index, layer in enumerate(network.layers):
        assert isinstance(layer, LlamaLayer)
        layer.self_attn = NormedAttention(index, config, dtype=context.dtype, device=context.device)
    draw_weights(network, context.device)
    pack_weights(network)
    return LlamaSubmodule(network)


CARD = ModelCard(
    name="random_qwen3",
    model="benchmark.random_qwen3:RandomQwen3Model",
    submodules="benchmark.random_qwen3:build_submodule",
    description="Qwen3-0.6B's shape with random weights, for measuring",
)
