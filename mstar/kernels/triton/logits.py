"""What changes logits before a draw, what is asked about them, and where a draw goes, each in few passes.

Runs on the thread of the forward. The formulas are those of `mstar.engine.resources.logit_adjust` and `logprobs`, in
the same order and without fused multiply-adds, so that both give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.triton.draw import key_of, logit_of
from mstar.kernels.triton.launch import dependent_launch, next_power_of_2, wait_for_inputs

_BLOCK = 4096
_LIST_BLOCK = 256
_LOWEST = tl.constexpr(-9999.0)
_INDEX_MASK = tl.constexpr((1 << 22) - 1)
_REPETITION, _PRESENCE, _FREQUENCY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
"""Columns of the table: those of `mstar.engine.resources.sampling_columns`."""


@triton.jit
def _change_kernel(
    logits, rows, handles, masks, bits, table, count_rows, output, prompt, vocab, stride, num_words, table_stride,
    HAS_MASKS: tl.constexpr, HAS_COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    own = logits + tl.load(rows + entry) * stride + columns
    x = tl.load(own, mask=inside)
    if HAS_MASKS:
        mask = tl.load(masks + entry)
        if mask >= 0:
            words = tl.load(bits + mask * num_words + columns // 32, mask=inside, other=0)
            x = tl.where(((words >> (columns % 32)) & 1) != 0, x, float("-inf"))
    if HAS_COUNTS:
        count_row = tl.load(count_rows + entry)
        if count_row > 0:
            params = table + tl.load(handles + entry) * table_stride
            repetition = tl.load(params + _REPETITION)
            presence, frequency = tl.load(params + _PRESENCE), tl.load(params + _FREQUENCY)
            count = tl.load(output + count_row * vocab + columns, mask=inside, other=0)
            seen = (count > 0) | (tl.load(prompt + count_row * vocab + columns, mask=inside, other=0) != 0)
            scaled = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
            x = tl.where(seen, scaled, x)
            x = x - frequency * count.to(tl.float32)
            x = x - presence * (count > 0).to(tl.float32)
    tl.store(own, x, mask=inside)


@triton.jit(do_not_specialize=["num_ids", "num_floor"])  # they grow while requests come: no compiling then
def _bias_kernel(
    logits, rows, bias_rows, ids, values, floor_ids, floors, stride, num_ids, num_floor, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64)
    bias_row = tl.load(bias_rows + entry)
    if bias_row > 0:
        own = logits + tl.load(rows + entry) * stride
        for begin in range(0, num_ids, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            value = tl.load(values + bias_row * num_ids + at, mask=at < num_ids, other=0.0)
            column = tl.load(ids + bias_row * num_ids + at, mask=at < num_ids, other=0)
            tl.atomic_add(own + column, value, mask=value != 0)
        if tl.load(floors + entry) < 0:
            for begin in range(0, num_floor, BLOCK):
                below = begin + tl.arange(0, BLOCK)
                masked = tl.load(floor_ids + bias_row * num_floor + below, mask=below < num_floor, other=0)
                tl.atomic_add(own + masked, tl.full([BLOCK], float("-inf"), tl.float32), mask=below < num_floor)


def mask_and_penalize(
    logits: Tensor,
    rows: Tensor,
    handles: Tensor,
    table: Tensor,
    masks: Tensor | None,
    bits: Tensor | None,
    count_rows: Tensor,
    output: Tensor | None,
    prompt: Tensor | None,
) -> None:
    """In place on ``rows`` int64 ``[n]`` of ``logits`` fp32 ``[step rows, vocab]``. ``masks`` int64 ``[n]``: rows of
    ``bits`` int32 ``[.., ceil(vocab / 32)]`` (-1: none; None: nobody has any); ``count_rows`` int64 ``[n]``: rows of
    ``output`` int32 and ``prompt`` bool ``[.., vocab]`` (0: none; None: nobody has any)."""
    vocab = logits.shape[1]
    _change_kernel[(rows.shape[0], triton.cdiv(vocab, _BLOCK))](
        logits, rows, handles, masks if masks is not None else rows, bits if bits is not None else rows, table,
        count_rows, output if output is not None else rows, prompt if prompt is not None else rows,
        vocab, logits.stride(0), 0 if bits is None else bits.shape[1], table.stride(0),
        HAS_MASKS=bits is not None, HAS_COUNTS=output is not None, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def add_biases(
    logits: Tensor, rows: Tensor, bias_rows: Tensor, ids: Tensor, values: Tensor, floor_ids: Tensor, floors: Tensor
) -> None:
    """In place on ``rows`` int64 ``[n]``: ``values`` fp32 at ``ids`` int64 ``[.., width]`` of each one's ``bias_rows``
    int64 ``[n]`` (0: none), and -inf at its ``floor_ids`` where ``floors`` fp32 ``[n]`` is negative."""
    _bias_kernel[(rows.shape[0],)](
        logits, rows, bias_rows, ids, values, floor_ids, floors, logits.stride(0), ids.shape[1], floor_ids.shape[1],
        BLOCK=_LIST_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _live_kernel(tokens, places, live, num_rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    token = tl.maximum(tl.load(tokens + row, mask=inside, other=0), 0)
    tl.store(live + tl.load(places + row, mask=inside, other=0), token.to(tl.int64), mask=inside)


def write_live(tokens: Tensor, places: Tensor, live: Tensor) -> None:
    """``live[places[i]] = max(tokens[i], 0)``; int64, int64 ``[rows]`` and int32 ``[rows]``."""
    num_rows = tokens.shape[0]
    _live_kernel[(triton.cdiv(num_rows, 128),)](
        tokens, places, live, num_rows, BLOCK=128, num_warps=1, **dependent_launch(tokens)
    )


@triton.jit
def _logprob_parts_kernel(
    logits, rows, tops, sums, vocab, stride, num_parts, num_top, TOP: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(rows + entry) * stride + columns, mask=columns < vocab, other=float("-inf"))
    largest = tl.max(x, 0)
    at = entry * num_parts + part
    total = tl.sum(tl.where(x > float("-inf"), tl.exp(x - largest), 0.0), 0)
    tl.store(sums + 2 * at, largest)
    tl.store(sums + 2 * at + 1, total)
    keys = tl.where(columns < vocab, key_of(x, columns), -1)
    for place in range(num_top):
        best = tl.max(keys, 0)
        tl.store(tops + at * TOP + place, best)
        keys = tl.where(keys == best, -1, keys)


@triton.jit
def _logprob_rows_kernel(
    logits, rows, places, tokens, tops, sums, out, stride, num_parts, num_top,
    TOP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    largest_of = tl.load(sums + 2 * (entry * num_parts + parts), mask=inside, other=float("-inf"))
    sum_of = tl.load(sums + 2 * (entry * num_parts + parts) + 1, mask=inside, other=0.0)
    largest = tl.max(largest_of, 0)
    log_total = largest + tl.log(tl.sum(tl.where(sum_of > 0, sum_of * tl.exp(largest_of - largest), 0.0), 0))
    place = tl.load(places + entry)
    token = tl.maximum(tl.load(tokens + place), 0)
    own = tl.load(logits + tl.load(rows + entry) * stride + token) - log_total
    out_row = out + place * (1 + 2 * num_top)
    tl.store(out_row, tl.maximum(own, _LOWEST))
    at = tl.arange(0, PARTS * TOP)
    known = (at // TOP < num_parts) & (at % TOP < num_top)
    keys = tl.load(tops + entry * num_parts * TOP + at, mask=known, other=-1)
    for rank in range(num_top):
        best = tl.max(keys, 0)
        tl.store(out_row + 1 + rank, ((best & _INDEX_MASK) ^ _INDEX_MASK).to(tl.float32))
        tl.store(out_row + 1 + num_top + rank, tl.maximum(logit_of(best) - log_total, _LOWEST))
        keys = tl.where(keys == best, -1, keys)


def log_probabilities(logits: Tensor, rows: Tensor, places: Tensor, tokens: Tensor, num_top: int, out: Tensor) -> None:
    """Into rows ``places`` int64 ``[n]`` of ``out`` fp32 ``[step rows, 1 + 2 * num_top]``, of ``rows`` int64 ``[n]`` of
    ``logits`` fp32: as `mstar.engine.resources.logprobs.log_probabilities`. ``tokens`` int32 ``[step rows]``."""
    num_rows, vocab = rows.shape[0], logits.shape[1]
    num_parts, top = triton.cdiv(vocab, _BLOCK), next_power_of_2(max(1, num_top))
    tops = torch.empty((num_rows, num_parts, top), dtype=torch.int64, device=logits.device)
    sums = torch.empty((num_rows, num_parts, 2), dtype=torch.float32, device=logits.device)
    _logprob_parts_kernel[(num_rows, num_parts)](
        logits, rows, tops, sums, vocab, logits.stride(0), num_parts, num_top, TOP=top, BLOCK=_BLOCK, num_warps=8
    )
    _logprob_rows_kernel[(num_rows,)](
        logits, rows, places, tokens, tops, sums, out, logits.stride(0), num_parts, num_top,
        TOP=top, PARTS=next_power_of_2(num_parts), num_warps=8,
    )  # fmt: skip
