"""The Llama network on packed tokens. Tensor in, tensor out.

Module names follow the checkpoint's, apart from the packed projections. Formulas: Touvron et al. 2023 (LLaMA),
Grattafiori et al. 2024 (Llama 3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.layers.attention import SelfAttention
from mstar.layers.decoder import Decoder
from mstar.layers.mlp import GatedMLP
from mstar.layers.norm import RMSNorm
from mstar.model.llama.config import LlamaConfig


class LlamaLayer(nn.Module):
    """One layer (see `DecoderLayer`)."""

    def __init__(self, c: LlamaConfig, index: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(
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
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, device=device)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, residual: Tensor, next_norm: RMSNorm) -> Tensor:
        x = self.self_attn(x, self.post_attention_layernorm.onto(residual))
        return self.mlp(x, next_norm.onto(residual))


class LlamaNetwork(Decoder):
    """Build it on the meta device, load it, then `pack_weights`."""

    def __init__(self, c: LlamaConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(
            (LlamaLayer(c, index, dtype=dtype, device=device) for index in range(c.num_layers)),
            RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device),
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            tied=c.tie_word_embeddings,
            dtype=dtype,
            device=device,
        )
