"""A mixture of experts: pairs of token and expert are put in the order of experts, then each expert's go through its
products tile by tile. Specified by `mstar.kernels.reference_experts.moe_mlp`.

Runs on the thread of the forward. How many pairs an expert has is known on the device only: there are as many programs
as could be needed, and those with nothing to do leave. Tiles are of one size, so a pair's result has the same bits in
any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.packed import PackedExperts
from mstar.kernels.triton.launch import dependent_launch, dot, next_power_of_2, wait_for_inputs

_PAIRS, _OUTPUTS, _INPUTS = 32, 64, 64
"""Of one tile."""


@triton.jit
def _order_kernel(ids, order, starts, num_pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Pairs of one expert, in the order of tokens, go to ``order[starts[expert]:starts[expert + 1]]``."""
    wait_for_inputs(PDL)
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        before += (tl.load(ids + first + i, mask=first + i < num_pairs, other=0x7FFFFFFF) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    for first in range(0, num_pairs, BLOCK):
        is_own = tl.load(ids + first + i, mask=first + i < num_pairs, other=-1) == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + place + rank - 1, first + i, mask=is_own)
        place += tl.max(rank, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, place)


@triton.jit
def _product_kernel(
    x, order, starts, weight, out, num_experts, num_out, x_stride, out_stride,
    NUM_IN: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`GATED`: from tokens' inputs to `silu(gate) * up` of pairs in their order. Otherwise from those to each pair."""
    wait_for_inputs(PDL)
    tile = tl.program_id(0)
    i = tl.arange(0, EXPERTS)
    first = tl.load(starts + i, mask=i < num_experts, other=0)
    last = tl.load(starts + 1 + i, mask=i < num_experts, other=0)
    tiles = tl.cdiv(last - first, PAIRS)
    last_tiles = tl.cumsum(tiles, 0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    if expert < num_experts:
        is_expert = i == expert
        number = tile - tl.sum(tl.where(is_expert, last_tiles - tiles, 0), 0)
        place = tl.sum(tl.where(is_expert, first, 0), 0) + number * PAIRS + tl.arange(0, PAIRS)
        is_pair = place < tl.sum(tl.where(is_expert, last, 0), 0)
        pair = tl.load(order + place, mask=is_pair, other=0)
        o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        k = tl.arange(0, INPUTS)
        if GATED:
            source, target = pair // CHOSEN, place
            rows = 2 * num_out
        else:
            source, target = place, pair
            rows = num_out
        from_at = x + source.to(tl.int64)[:, None] * x_stride + k[None, :]
        weight_at = weight + (expert.to(tl.int64) * rows + o)[:, None] * NUM_IN + k[None, :]
        acc = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        up = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for begin in range(0, NUM_IN, INPUTS):
            is_input = (begin + k < NUM_IN)[None, :]
            inputs = tl.load(from_at + begin, mask=is_pair[:, None] & is_input, other=0.0)
            is_weight = (o < num_out)[:, None] & is_input
            w = tl.load(weight_at + begin, mask=is_weight, other=0.0)
            acc = dot(inputs, tl.trans(w), acc)
            if GATED:
                w = tl.load(weight_at + begin + num_out.to(tl.int64) * NUM_IN, mask=is_weight, other=0.0)
                up = dot(inputs, tl.trans(w), up)
        if GATED:  # rounded where the dense layers round
            acc = acc.to(x.dtype.element_ty).to(tl.float32)
            acc = acc * tl.sigmoid(acc) * up.to(x.dtype.element_ty).to(tl.float32)
        to = out + target.to(tl.int64)[:, None] * out_stride + o[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & (o < num_out)[None, :])


@triton.jit
def _sum_kernel(
    results, weights, plus, out, width, plus_stride, out_stride,
    CHOSEN: tl.constexpr, PLUS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(CHOSEN):
        result = tl.load(results + (token * CHOSEN + j) * width + columns, mask=inside, other=0.0)
        total += result * tl.load(weights + token * CHOSEN + j)
    if PLUS:
        total += tl.load(plus + token * plus_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)


def moe_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    plus: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """`mstar.kernels.ops.moe_mlp`."""
    tokens, hidden = x.shape
    chosen = expert_ids.shape[1]
    num_experts, width = gate_up.num_experts, gate_up.out_features // 2
    if out is None:
        out = torch.empty_like(x)
    contiguous = (expert_ids, expert_weights, gate_up.data, down.data)
    if x.stride(1) != 1 or out.stride(1) != 1 or not all(each.is_contiguous() for each in contiguous):
        return NotImplemented
    if expert_ids.dtype is not torch.int32 or x.dtype != gate_up.dtype or (plus is not None and plus.stride(1) != 1):
        return NotImplemented
    if tokens == 0:
        return out
    pairs = tokens * chosen
    launch = dependent_launch(x)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    _order_kernel[(num_experts,)](expert_ids, order, starts, pairs, BLOCK=1024, num_warps=4, **launch)
    middle = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    results = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(pairs, _PAIRS) + min(num_experts, pairs)  # at most: each expert may end within a tile
    for source, weight, to, gated in ((x, gate_up.data, middle, True), (middle, down.data, results, False)):
        num_out = to.shape[1]
        _product_kernel[(tiles, triton.cdiv(num_out, _OUTPUTS))](
            source, order, starts, weight, to, num_experts, num_out, source.stride(0), to.stride(0),
            NUM_IN=source.shape[1], CHOSEN=chosen, GATED=gated, EXPERTS=next_power_of_2(num_experts),
            PAIRS=_PAIRS, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, num_warps=4, num_stages=3, **launch,
        )  # fmt: skip
    _sum_kernel[(tokens, triton.cdiv(hidden, 1024))](
        results, expert_weights, x if plus is None else plus, out, hidden, 0 if plus is None else plus.stride(0),
        out.stride(0), CHOSEN=chosen, PLUS=plus is not None, BLOCK=1024, num_warps=4, **launch,
    )  # fmt: skip
    return out
