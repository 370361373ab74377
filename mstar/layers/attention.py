"""Attention layers. They name the resources they use by key and own no cache, table or position.

`bind_resources` runs once on the loading thread, the rest in forwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.engine.layer_handles import AttentionHandle, FindLayer, RotaryHandle
from mstar.kernels.fused_norms import AddNorm, HeadNorms
from mstar.layers.linear import Linear


class PagedAttention(nn.Module):
    """Attention of packed queries, keys and values over the cache of the attention resource `attn_key`.

    `layer_index` counts the layers that share the cache. `pos_key=None`: no rotary embedding.
    """

    _attention: AttentionHandle
    _rotary: RotaryHandle | None

    def __init__(self, layer_index: int, *, attn_key: str, pos_key: str | None) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.attn_key = attn_key
        self.pos_key = pos_key

    def bind_resources(self, find: FindLayer) -> None:
        self._attention = find(self.attn_key, self.layer_index)
        self._rotary = None if self.pos_key is None else find(self.pos_key, self.layer_index)

    def forward(self, qkv: Tensor, norms: HeadNorms | None = None) -> Tensor:
        """`[tokens, (heads + 2 kv_heads) * head_dim]` (overwritten) → `[tokens, heads * head_dim]`."""
        return self._attention.attend(qkv, self._rotary, norms=norms)


class SelfAttention(nn.Module):
    """Projection to queries, keys and values in one product (rows in this order), attention, output projection."""

    def __init__(
        self,
        layer_index: int,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        attn_key: str,
        pos_key: str | None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        qkv_width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv_proj = Linear(hidden_size, qkv_width, bias=bias, dtype=dtype, device=device)
        self.attend = PagedAttention(layer_index, attn_key=attn_key, pos_key=pos_key)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, then: AddNorm | None = None) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`. `then`: see `Linear.forward_then`."""
        return self.o_proj.forward_then(self.attend(self.qkv_proj(x)), then)
