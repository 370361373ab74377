"""Feed-forward layers. Called by forwards; no state but the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.kernels import ops
from mstar.kernels.fused_norms import AddNorm
from mstar.layers.linear import Linear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up in one product (rows in this order)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, then: AddNorm | None = None) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`. `then`: see `Linear.forward_then`."""
        return self.down_proj.forward_then(ops.gated_linear(x, self.gate_up_proj.packed), then)
