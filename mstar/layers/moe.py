"""Feed-forward layers of several experts. Called by forwards; no state but the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.kernels import ops
from mstar.kernels.fused_norms import AddNorm
from mstar.kernels.packed import PackedExperts
from mstar.layers.embedding import OutputHead
from mstar.layers.mlp import GatedMLP


class Experts(nn.Module):
    """Gated MLPs side by side: `gate_up_proj [experts, 2 * width, hidden]`, `down_proj [experts, hidden, width]`."""

    packed_gate_up: PackedExperts
    packed_down: PackedExperts

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        shapes = (num_experts, 2 * width, hidden_size), (num_experts, hidden_size, width)
        gate_up, down = (
            nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False) for shape in shapes
        )
        self.gate_up_proj: nn.Parameter | None = gate_up
        self.down_proj: nn.Parameter | None = down

    def pack(self) -> None:
        """Lay the loaded weights out for the kernels and let go of the parameters."""
        if self.gate_up_proj is None or self.down_proj is None:
            raise RuntimeError("the weights of experts are packed once")
        self.packed_gate_up = ops.pack_experts(self.gate_up_proj.data)
        self.gate_up_proj = None
        self.packed_down = ops.pack_experts(self.down_proj.data)
        self.down_proj = None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, plus: Tensor) -> Tensor:
        """`plus` (overwritten and returned) and the weighted results of each token's experts; `x` and `plus` `[tokens,
        hidden]`, `ids` int32 and `weights` fp32 `[tokens, chosen]`."""
        return ops.moe_mlp(x, ids, weights, self.packed_gate_up, self.packed_down, plus=plus, out=plus)


class SharedExpertMoE(nn.Module):
    """The likeliest `num_chosen` of `num_experts` for each token, by a softmax over all and with weights scaled to a
    sum of 1, and one expert for all tokens, times the sigmoid of a gate of its own.

    The gate is the last row of `router`. Choices are made on fp32 logits.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        num_chosen: int,
        expert_width: int,
        shared_width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.num_chosen = num_chosen
        self.router = OutputHead(hidden_size, num_experts + 1, dtype=dtype, device=device)
        self.experts = Experts(num_experts, hidden_size, expert_width, dtype=dtype, device=device)
        self.shared_expert = GatedMLP(hidden_size, shared_width, dtype=dtype, device=device)

    def forward(self, x: Tensor, then: AddNorm | None = None) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`. `then`: see `Linear.forward_then`."""
        scores = self.router(x)  # fp32 [tokens, experts + 1]
        ids, weights = ops.router_top_k(scores[:, : self.num_experts], self.num_chosen)
        shared = ops.sigmoid_mul(self.shared_expert(x), scores[:, self.num_experts :])
        mixed = self.experts(x, ids, weights, shared)
        return mixed if then is None else ops.fused_add_rms_norm(mixed, *then)
