"""Greedy choice: the largest logit of each row, in two passes over keys that order as the rule does.

Runs on the thread of the forward. A key holds the logit's bits as an integer that sorts like the number, NaN above all,
and below them the index counted backwards, so that one integer maximum settles ties too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.triton.launch import dependent_launch, next_power_of_2, wait_for_inputs

_COLUMNS = 4096


@triton.jit
def _part_kernel(
    logits, rows, keys, vocab, stride, num_parts, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry) if HAS_ROWS else entry
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    value = tl.where(value == 0.0, 0.0, value)  # -0 equals 0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value == value, order, 0x7FFFFFFF)
    largest = tl.max(order, 0)
    first = tl.min(tl.where(order == largest, columns, 0x7FFFFFFF), 0)
    tl.store(keys + entry * num_parts + part, (largest.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64))


@triton.jit
def _whole_kernel(keys, out, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    key = tl.load(keys + row * num_parts + parts, mask=parts < num_parts, other=-(1 << 63))
    index = 0x7FFFFFFF - (tl.max(key, 0) & 0x7FFFFFFF)
    tl.store(out + row, index.to(tl.int32))


@triton.jit
def _token_kernel(keys, rows, tokens, num_parts, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    entry = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    key = tl.max(tl.load(keys + entry * num_parts + parts, mask=parts < num_parts, other=-(1 << 63)), 0)
    order = key >> 32
    # Between minus infinity and infinity; NaN is above both.
    finite = (order > -0x7F800001) & (order < 0x7F800000)
    token = tl.where(finite, 0x7FFFFFFF - (key & 0x7FFFFFFF), -1).to(tl.int32)
    if HAS_ROWS:
        row = tl.load(rows + entry)
        token = tl.where(tl.load(tokens + row) < 0, -1, token)
        tl.store(tokens + row, token)
    else:
        tl.store(tokens + entry, token)


def largest_tokens(logits: Tensor, tokens: Tensor, rows: Tensor | None = None) -> None:
    """The index of the largest logit into ``tokens`` int32 ``[step rows]``, or -1 where it is not finite, for each row
    of ``logits`` fp32 ``[step rows, vocab]``; with ``rows`` int64 ``[n]`` for those, and -1 stays."""
    num_rows, vocab = logits.shape[0] if rows is None else rows.shape[0], logits.shape[1]
    num_parts = triton.cdiv(vocab, _COLUMNS)
    keys = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    launch, given = dependent_launch(logits), tokens if rows is None else rows
    has_rows = rows is not None
    _part_kernel[(num_rows, num_parts)](
        logits,
        given,
        keys,
        vocab,
        logits.stride(0),
        num_parts,
        HAS_ROWS=has_rows,
        BLOCK=_COLUMNS,
        num_warps=8,
        **launch,
    )
    _token_kernel[(num_rows,)](
        keys, given, tokens, num_parts, HAS_ROWS=has_rows, BLOCK=next_power_of_2(num_parts), num_warps=1, **launch
    )


def greedy(logits: Tensor, out: Tensor | None) -> Tensor:
    """`mstar.kernels.ops.greedy`."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        return NotImplemented
    rows, vocab = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if out.dtype is not torch.int32 or not out.is_contiguous():
        return NotImplemented
    if rows == 0:
        return out
    num_parts = triton.cdiv(vocab, _COLUMNS)
    keys = torch.empty((rows, num_parts), dtype=torch.int64, device=logits.device)
    launch = dependent_launch(logits)
    _part_kernel[(rows, num_parts)](
        logits, out, keys, vocab, logits.stride(0), num_parts, HAS_ROWS=False, BLOCK=_COLUMNS, num_warps=8, **launch
    )
    _whole_kernel[(rows,)](keys, out, num_parts, BLOCK=next_power_of_2(num_parts), num_warps=1, **launch)
    return out
