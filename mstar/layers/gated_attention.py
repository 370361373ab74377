"""Attention whose result is gated. Names its resources by key and owns no cache, table or position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.kernels import ops
from mstar.kernels.fused_norms import AddNorm, HeadNorms
from mstar.layers.attention import PagedAttention
from mstar.layers.linear import Linear
from mstar.layers.norm import RMSNorm


class GatedAttention(nn.Module):
    """Queries, keys, values and gates in one product (rows in this order), zero-centred norms of each query and key
    head, attention, its result times the sigmoid of the gates, output projection (Qiu et al. 2025, "Gated Attention for
    Large Language Models")."""

    def __init__(
        self,
        layer_index: int,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        bias: bool,
        attn_key: str,
        pos_key: str | None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv_width = (num_heads + 2 * num_kv_heads) * head_dim
        width = self.qkv_width + num_heads * head_dim
        self.qkv_gate_proj = Linear(hidden_size, width, bias=bias, dtype=dtype, device=device)
        self.q_norm = RMSNorm(head_dim, eps, zero_centered=True, dtype=dtype, device=device)
        self.k_norm = RMSNorm(head_dim, eps, zero_centered=True, dtype=dtype, device=device)
        self.attend = PagedAttention(layer_index, attn_key=attn_key, pos_key=pos_key)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, then: AddNorm | None = None) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`. `then`: see `Linear.forward_then`."""
        wide = self.qkv_gate_proj(x)
        qkv, gate = wide[:, : self.qkv_width], wide[:, self.qkv_width :]
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, zero_centered=True)
        return self.o_proj.forward_then(ops.sigmoid_mul(self.attend(qkv, norms), gate), then)
