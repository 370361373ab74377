"""Root-mean-square norms. Called by forwards; no state but the weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.kernels import ops
from mstar.kernels.fused_norms import AddNorm, GatedNorm


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps)` over the last dimension, scaled by `weight` (`1 + weight` if zero-centred)."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        zero_centered: bool = False,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)

    def onto(self, residual: Tensor) -> AddNorm:
        """The norm of `residual` after an addition to it, as an argument of what is added."""
        return AddNorm(residual, self.weight, self.eps, self.zero_centered)


class GatedRMSNorm(nn.Module):
    """`RMSNorm` of each head with one weight for all heads, times `silu` of a gate."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x [tokens, heads * width]` (overwritten and returned), `gate` of the same shape."""
        return ops.gated_rms_norm(x, gate, self.weight, self.eps, out=x)

    def by(self, gate: Tensor) -> GatedNorm:
        """The same as an argument of what makes `x`."""
        return GatedNorm(gate, self.weight, self.eps)
