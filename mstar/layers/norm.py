"""Root-mean-square norms. Called by forwards; no state but the weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.kernels import ops


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

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual += x`, then the norm of it written over `x`, which is returned."""
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps, zero_centered=self.zero_centered)
