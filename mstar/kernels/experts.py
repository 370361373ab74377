"""The operations of a mixture of experts: part of `mstar.kernels.ops`, which see for the rules.

Runs on the thread of the forward. Must not read which experts were chosen in Python, so that a forward can be recorded.
"""

from __future__ import annotations

from torch import Tensor

from mstar.kernels import reference_experts
from mstar.kernels.packed import PackedExperts
from mstar.kernels.selection import compiled, compiled_for, compiled_to_pack, refuse_recording, triton_kernels


def pack_experts(weight: Tensor) -> PackedExperts:
    """Lay ``weight`` ``[experts, out_features, in_features]`` out for `moe_mlp`. It may be freed afterwards."""
    if weight.dim() != 3:
        raise ValueError(f"weights of experts have 3 dimensions, not {tuple(weight.shape)}")
    if compiled_to_pack() is not None and (native := compiled_for(weight)) is not None:
        return native.experts.pack(weight)
    experts, num_out, num_in = weight.shape
    return PackedExperts(weight, experts, num_out, num_in, weight.dtype, 0)


def router_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest experts of each token by ``softmax(logits)``, and their probabilities scaled to a sum of 1.

    ``logits`` fp32 ``[tokens, experts]``. Returns ids int32 and weights fp32, ``[tokens, k]``, the likeliest first and
    the lowest index first among equals. A row with a NaN gets valid ids and NaN weights.
    """
    if not 0 < k <= logits.shape[1]:
        raise ValueError(f"cannot choose {k} of {logits.shape[1]} experts")
    if (native := compiled_for(logits)) is not None:
        result = native.experts.router_top_k(logits, k)
        if result is not NotImplemented:
            return result
    return reference_experts.router_top_k(logits, k)


def moe_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    plus: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``plus + sum over j of expert_weights[:, j] · MLP of expert expert_ids[:, j]``, for ``x [tokens, hidden]``.

    An expert's MLP is ``down(silu(gate(x)) * up(x))``, rounded where the dense layers round it, except that the
    weighted sum takes its results in fp32, in the order of ``j``, and is rounded once with ``plus``.

    Args:
        expert_ids: int32 ``[tokens, k]``; ``expert_weights`` fp32, the same shape.
        gate_up: ``[experts, 2 * width, hidden]``, the gate first; ``down`` ``[experts, hidden, width]``.
        plus: as ``x``, may be ``out``: what else the block adds, such as the result of a shared expert.
    """
    if gate_up.block and (native := compiled()) is not None:
        result = native.experts.moe_mlp(x, expert_ids, expert_weights, gate_up, down, plus, out)
        if result is not NotImplemented:
            return result
    if x.is_cuda and (device_kernels := triton_kernels()) is not None:
        result = device_kernels.experts.moe_mlp(x, expert_ids, expert_weights, gate_up, down, plus, out)
        if result is not NotImplemented:
            return result
    refuse_recording("moe_mlp")  # the reference reads which experts were chosen
    result = reference_experts.moe_mlp(x, expert_ids, expert_weights, gate_up, down, plus)
    return result if out is None else out.copy_(result)
