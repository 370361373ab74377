"""Norms that a kernel may do on the way, as arguments of `mstar.kernels.ops`.

Built by layers, read on the thread of the forward. Hold weights of layers and views of a step's tensors, nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadNorms(NamedTuple):
    """Of each query and key head before its rotation; see `mstar.kernels.ops.rms_norm`. Weights `[head_dim]`."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    zero_centered: bool


class GatedNorm(NamedTuple):
    """Of each head of a result; see `mstar.kernels.ops.gated_rms_norm`. `z [tokens, heads * dim]`, `weight [dim]`."""

    z: Tensor
    weight: Tensor
    eps: float


class AddNorm(NamedTuple):
    """Of a residual stream after something was added to it; see `mstar.kernels.ops.fused_add_rms_norm`.
    `residual [tokens, width]` is written, `weight [width]`."""

    residual: Tensor
    weight: Tensor
    eps: float
    zero_centered: bool
