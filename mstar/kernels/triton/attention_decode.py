"""Attention of single queries over paged keys and values: split over the keys, no plan on the host.

Runs on the thread of the forward. Every token is taken by itself, whatever row it belongs to. How its keys are divided
follows from their number alone, and parts are added up in their order, so a token's result has the same bits in any
batch; how many programs share the parts follows from the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.triton.launch import dependent_launch, dot, let_next_start, next_power_of_2, wait_for_inputs
from mstar.kernels.triton.limits import why_no_attention
from mstar.kernels.triton.rope import has_plain_slots

_NOTHING = tl.constexpr(-1e30)


class Division(NamedTuple):
    """How keys are divided. A part has at least `span` keys, a row at most `most_parts`: a longer row has longer parts.
    `keys` are read at a time."""

    keys: int
    span: int
    most_parts: int
    num_warps: int
    num_stages: int


_DIVISION = Division(keys=64, span=128, most_parts=32, num_warps=4, num_stages=3)
"""One for all, for the sake of bits that do not depend on the batch."""


@triton.jit
def _attend_kernel(
    q, k_pages, v_pages, table, kv_lens, q_starts, out, part_out, part_sums, scale, num_rows,
    q_token, q_head, out_token, out_head, page_stride, slot_stride, table_stride, parts_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    KEYS: tl.constexpr, SPAN: tl.constexpr, MOST_PARTS: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_part = tl.program_id(2)
    num_programs = tl.num_programs(2)
    row, seen = _row_and_keys(q_starts, kv_lens, token, num_rows, ROWS, CAUSAL)
    wait_for_inputs(PDL)
    if row < num_rows:
        span = _span(seen, KEYS, SPAN, MOST_PARTS)
        num_parts = tl.maximum(tl.cdiv(seen, span), 1)
        if first_part < num_parts:
            PER: tl.constexpr = HEADS // KV_HEADS
            member = tl.arange(0, GROUP)
            d = tl.arange(0, DIM)
            is_member = member < PER
            head = kv_head * PER + member
            inside = is_member[:, None] & (d < HEAD_DIM)[None, :]
            query = tl.load(
                q + token.to(tl.int64) * q_token + head[:, None] * q_head + d[None, :], mask=inside, other=0.0
            )
            to = out + token.to(tl.int64) * out_token + head[:, None] * out_head + d[None, :]
            part_at = (token.to(tl.int64) * KV_HEADS + kv_head) * parts_stride
            for part in range(first_part, num_parts, num_programs):
                best, total, acc = _attend_part(
                    query, k_pages, v_pages, table + row.to(tl.int64) * table_stride, part * span,
                    tl.minimum(seen, (part + 1) * span), scale, page_stride, slot_stride, kv_head * HEAD_DIM,
                    HEAD_DIM, DIM, GROUP, KEYS, PAGE_SIZE,
                )  # fmt: skip
                if num_parts == 1:
                    tl.store(to, (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty), mask=inside)
                else:
                    place = (part_at + part) * PER + member
                    tl.store(part_out + place[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
                    tl.store(part_sums + place * 2, best, mask=is_member)
                    tl.store(part_sums + place * 2 + 1, total, mask=is_member)


@triton.jit
def _sum_parts_kernel(
    part_out, part_sums, kv_lens, q_starts, out, num_rows, out_token, out_head, parts_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    SPAN: tl.constexpr, MOST_PARTS: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token: its parts in their order, `TOGETHER` of them asked for before the first arrives."""
    let_next_start(PDL)
    token = tl.program_id(0)
    head = tl.program_id(1)
    row, seen = _row_and_keys(q_starts, kv_lens, token, num_rows, ROWS, CAUSAL)
    wait_for_inputs(PDL)
    span = _span(seen, KEYS, SPAN, MOST_PARTS)
    num_parts = tl.cdiv(seen, span)
    if (row < num_rows) & (num_parts > 1):
        PER: tl.constexpr = HEADS // KV_HEADS
        part = tl.arange(0, TOGETHER)
        d = tl.arange(0, DIM)
        part_at = (token.to(tl.int64) * KV_HEADS + head // PER) * parts_stride
        best = tl.full([1], _NOTHING, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([DIM], tl.float32)
        for first in range(0, num_parts, TOGETHER):
            exists = first + part < num_parts
            place = (part_at + first + part) * PER + head % PER
            inside = exists[:, None] & (d < HEAD_DIM)[None, :]
            part_acc = tl.load(part_out + place[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            part_best = tl.load(part_sums + place * 2, mask=exists, other=_NOTHING)
            part_total = tl.load(part_sums + place * 2 + 1, mask=exists, other=0.0)
            higher = tl.maximum(best, tl.max(part_best, 0))
            keep = tl.exp(best - higher)
            weight = tl.exp(part_best - higher)
            total = total * keep + tl.sum(part_total * weight, 0)
            acc = acc * keep + tl.sum(part_acc * weight[:, None], 0)
            best = higher
        result = (acc / tl.maximum(total, 1e-30)).to(out.dtype.element_ty)
        tl.store(out + token.to(tl.int64) * out_token + head * out_head + d, result, mask=d < HEAD_DIM)


@triton.jit
def _row_and_keys(q_starts, kv_lens, token, num_rows, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """The row that owns the token, ``num_rows`` for padding, and how many keys the token sees. Mostly every row has one
    token: then the token's number is the row's, and one look at memory tells all."""
    row = tl.minimum(token, num_rows - 1)
    begin = tl.load(q_starts + row)
    end = tl.load(q_starts + row + 1)
    seen = tl.load(kv_lens + row)
    if (begin != token) | (end != token + 1):
        i = tl.arange(0, ROWS)
        ends = tl.load(q_starts + 1 + i, mask=i < num_rows, other=0x7FFFFFFF)
        row = tl.sum((ends <= token).to(tl.int32), 0)
        if row < num_rows:
            end = tl.load(q_starts + row + 1)
            seen = tl.load(kv_lens + row)
    if CAUSAL:
        seen = tl.maximum(seen - (end - 1 - token), 0)
    return row, seen


@triton.jit
def _span(seen, KEYS: tl.constexpr, SPAN: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Keys of a part."""
    return tl.maximum(tl.cdiv(tl.cdiv(seen, MOST_PARTS), KEYS) * KEYS, SPAN)


@triton.jit
def _attend_part(
    query, k_pages, v_pages, pages, begin, end, scale, page_stride, slot_stride, head_offset,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """``(largest score, sum of weights, weighted values)`` over the keys ``begin:end`` of one row."""
    d = tl.arange(0, DIM)
    n = tl.arange(0, KEYS)
    best = tl.full([GROUP], _NOTHING, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, DIM], tl.float32)
    for start in range(begin, end, KEYS):
        visible = start + n < end
        if PAGE_SIZE % KEYS == 0:  # parts start at multiples of KEYS, so a block lies in one page
            page = tl.load(pages + start // PAGE_SIZE).to(tl.int64)
            place = page * page_stride + (start % PAGE_SIZE + n) * slot_stride + head_offset
        else:
            page = tl.load(pages + (start + n) // PAGE_SIZE, mask=visible, other=0).to(tl.int64)
            place = page * page_stride + ((start + n) % PAGE_SIZE) * slot_stride + head_offset
        inside = visible[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_pages + place[:, None] + d[None, :], mask=inside, other=0.0)
        v = tl.load(v_pages + place[:, None] + d[None, :], mask=inside, other=0.0)
        scores = dot(query, tl.trans(k), tl.zeros([GROUP, KEYS], tl.float32)) * scale
        scores = tl.where(visible[None, :], scores, _NOTHING)
        higher = tl.maximum(best, tl.max(scores, 1))
        keep = tl.exp(best - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * keep + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * keep[:, None])
        best = higher
    return best, total, acc


def attend_tokens(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor,
    scale: float,
    causal: bool,
    out: Tensor,
    division: Division = _DIVISION,
) -> Tensor:
    """`mstar.kernels.ops.paged_attend`, fast where rows have one query each."""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    rows = kv_lens.shape[0]
    if not serves(q, k_pages, v_pages, block_table, out):
        return NotImplemented
    if tokens == 0 or rows == 0:
        return out
    dim = max(16, next_power_of_2(head_dim))
    most_parts = min(division.most_parts, triton.cdiv(block_table.shape[1] * page_size, division.span))
    # Twice the processors of a large card: enough to keep them all busy, few enough that idle programs cost nothing.
    num_programs = min(most_parts, triton.cdiv(264, tokens * kv_heads))
    group = heads // kv_heads
    shape = (tokens, kv_heads, most_parts, group)
    part_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    part_sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    launch = dependent_launch(q)
    shared = {
        "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "DIM": dim, "KEYS": division.keys,
        "SPAN": division.span, "MOST_PARTS": division.most_parts, "ROWS": next_power_of_2(rows), "CAUSAL": causal,
    }  # fmt: skip
    _attend_kernel[(tokens, kv_heads, num_programs)](
        q, k_pages, v_pages, block_table, kv_lens, q_starts, out, part_out, part_sums, scale, rows,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_pages.stride(0), k_pages.stride(1),
        block_table.stride(0), most_parts, GROUP=max(16, next_power_of_2(group)), PAGE_SIZE=page_size,
        num_warps=division.num_warps, num_stages=division.num_stages, **shared, **launch,
    )  # fmt: skip
    if most_parts > 1:
        _sum_parts_kernel[(tokens, heads)](
            part_out, part_sums, kv_lens, q_starts, out, rows, out.stride(0), out.stride(1), most_parts,
            TOGETHER=min(16, next_power_of_2(most_parts)), num_warps=4, **shared, **launch,
        )  # fmt: skip
    return out


def serves(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, out: Tensor) -> bool:
    """True for layouts that the attention kernels read."""
    heads, head_dim = q.shape[1:]
    return (
        k_pages.dtype == v_pages.dtype == q.dtype
        and k_pages.stride() == v_pages.stride()
        and has_plain_slots(k_pages)
        and q.stride(2) == out.stride(2) == block_table.stride(1) == 1
        and why_no_attention(heads, k_pages.shape[2], head_dim) is None
    )
