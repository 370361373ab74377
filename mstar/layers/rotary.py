"""Rotary embedding of packed queries and keys by tables that a model makes itself, where no cache gives positions."""

from __future__ import annotations

from torch import Tensor

from mstar.kernels import ops


def rotate(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, head_dim: int) -> None:
    """Rotate-half, in place, of the first `num_heads` heads of `qkv [tokens, width]`; `positions` int32 [tokens] are
    rows of `cos` and `sin` fp32 [rows, head_dim / 2]."""
    ops.rope(qkv, positions, cos, sin, num_heads, head_dim)
