"""Mixture of experts in plain torch: the specification of `mstar.kernels.ops.moe_mlp` and `router_top_k`.

Runs on the thread of the forward, on any device and floating dtype. `moe_mlp` reads on the host which experts the
tokens have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.kernels import reference
from mstar.kernels.packed import PackedExperts


def router_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `mstar.kernels.ops.router_top_k`."""
    order = logits.nan_to_num(float("-inf"), float("inf"), float("-inf")).sort(dim=-1, descending=True, stable=True)
    ids = order.indices[:, :k]
    chosen = torch.softmax(logits.float(), -1).gather(1, ids)
    return ids.to(torch.int32), chosen / chosen.sum(-1, keepdim=True)


def moe_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    plus: Tensor | None,
) -> Tensor:
    """See `mstar.kernels.ops.moe_mlp`."""
    results = torch.zeros((*expert_ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        tokens, places = torch.where(expert_ids == expert)
        hidden = reference.linear(x[tokens], gate_up.matrix(expert), None, x.dtype)
        hidden = reference.silu_and_mul(hidden)
        results[tokens, places] = reference.linear(hidden, down.matrix(expert), None, torch.float32)
    total = (results * expert_weights[..., None]).sum(1)
    return (total if plus is None else total + plus.float()).to(x.dtype)
