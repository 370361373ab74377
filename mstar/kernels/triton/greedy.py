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
def _part_kernel(logits, keys, vocab, stride, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    value = tl.where(value == 0.0, 0.0, value)  # -0 equals 0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value == value, order, 0x7FFFFFFF)
    largest = tl.max(order, 0)
    first = tl.min(tl.where(order == largest, columns, 0x7FFFFFFF), 0)
    tl.store(keys + row * num_parts + part, (largest.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64))


@triton.jit
def _whole_kernel(keys, out, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    key = tl.load(keys + row * num_parts + parts, mask=parts < num_parts, other=-(1 << 63))
    index = 0x7FFFFFFF - (tl.max(key, 0) & 0x7FFFFFFF)
    tl.store(out + row, index.to(tl.int32))


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
        logits, keys, vocab, logits.stride(0), num_parts, BLOCK=_COLUMNS, num_warps=8, **launch
    )
    _whole_kernel[(rows,)](keys, out, num_parts, BLOCK=next_power_of_2(num_parts), num_warps=1, **launch)
    return out
