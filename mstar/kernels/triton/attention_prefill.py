"""Attention of many queries per row over paged keys and values, a tile of queries at a time.

Runs on the thread of the forward. A query's result depends on its own position and keys only: blocks of keys start at
fixed positions, and what a tile reads beyond what a query may see adds zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.triton.attention_decode import serves
from mstar.kernels.triton.launch import dependent_launch, dot, next_power_of_2, wait_for_inputs

_NOTHING = tl.constexpr(-1e30)


_LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """Queries of a program, and keys read at a time."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


_NARROW, _WIDE = Tile(64, 64, 4, 2), Tile(64, 32, 4, 3)
"""For heads of up to 128 numbers, and wider ones."""


@triton.jit
def _attend_kernel(
    q, k_pages, v_pages, table, kv_lens, q_starts, out, scale, num_rows,
    q_token, q_head, out_token, out_head, page_stride, slot_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys first
    head = tl.program_id(1)
    # Which row and which of its tiles this is: rows have their tiles one after the other.
    i = tl.arange(0, ROWS)
    begins = tl.load(q_starts + i, mask=i < num_rows, other=0)
    ends = tl.load(q_starts + 1 + i, mask=i < num_rows, other=0)
    tiles = tl.where(i < num_rows, tl.cdiv(ends - begins, QUERIES), 0)
    last_tiles = tl.cumsum(tiles, 0)
    row = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    if row < num_rows:
        is_row = i == row
        begin = tl.sum(tl.where(is_row, begins, 0), 0)
        end = tl.sum(tl.where(is_row, ends, 0), 0)
        number = tile - tl.sum(tl.where(is_row, last_tiles - tiles, 0), 0)
        kv_len = tl.load(kv_lens + row)
        token = begin + number * QUERIES + tl.arange(0, QUERIES)
        d = tl.arange(0, DIM)
        inside = (token < end)[:, None] & (d < HEAD_DIM)[None, :]
        query = tl.load(q + token.to(tl.int64)[:, None] * q_token + head * q_head + d[None, :], mask=inside, other=0.0)
        seen = tl.zeros([QUERIES], tl.int32) + kv_len
        if CAUSAL:
            seen = tl.minimum(kv_len - (end - 1 - token), kv_len)
        most = tl.max(seen, 0)
        # Up to here every query sees every key.
        least = tl.maximum(tl.min(seen, 0), 0) // KEYS * KEYS
        best = tl.full([QUERIES], _NOTHING, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, DIM], tl.float32)
        pages = table + row.to(tl.int64) * table_stride
        offset = (head // GROUP) * HEAD_DIM
        for start in range(0, least, KEYS):
            best, total, acc = _add_keys(
                best, total, acc, query, seen, k_pages, v_pages, pages, start, kv_len, scale, page_stride, slot_stride,
                offset, HEAD_DIM, DIM, KEYS, PAGE_SIZE, False,
            )  # fmt: skip
        for start in range(least, most, KEYS):
            best, total, acc = _add_keys(
                best, total, acc, query, seen, k_pages, v_pages, pages, start, kv_len, scale, page_stride, slot_stride,
                offset, HEAD_DIM, DIM, KEYS, PAGE_SIZE, True,
            )  # fmt: skip
        result = (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
        to = out + token.to(tl.int64)[:, None] * out_token + head * out_head + d[None, :]
        tl.store(to, result, mask=inside)


@triton.jit
def _add_keys(
    best, total, acc, query, seen, k_pages, v_pages, pages, start, kv_len, scale, page_stride, slot_stride, offset,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with the keys from `start`; unless `MASKED`, all of them exist and are seen. `scale` is that of powers of
    two."""
    d = tl.arange(0, DIM)
    n = tl.arange(0, KEYS)
    if PAGE_SIZE % KEYS == 0:
        page = tl.load(pages + start // PAGE_SIZE).to(tl.int64)
        place = page * page_stride + (start % PAGE_SIZE + n) * slot_stride + offset
    else:
        page = tl.load(pages + (start + n) // PAGE_SIZE, mask=start + n < kv_len, other=0).to(tl.int64)
        place = page * page_stride + ((start + n) % PAGE_SIZE) * slot_stride + offset
    if MASKED:
        here = (start + n < kv_len)[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_pages + place[:, None] + d[None, :], mask=here, other=0.0)
        v = tl.load(v_pages + place[:, None] + d[None, :], mask=here, other=0.0)
    elif HEAD_DIM < DIM:
        k = tl.load(k_pages + place[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_pages + place[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_pages + place[:, None] + d[None, :])
        v = tl.load(v_pages + place[:, None] + d[None, :])
    scores = dot(query, tl.trans(k), tl.zeros([query.shape[0], KEYS], tl.float32)) * scale
    if MASKED:
        visible = (start + n)[None, :] < seen[:, None]
        scores = tl.where(visible, scores, _NOTHING)
    higher = tl.maximum(best, tl.max(scores, 1))
    keep = tl.exp2(best - higher)
    weights = tl.exp2(scores - higher[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    total = total * keep + tl.sum(weights, 1)
    acc = dot(weights.to(v.dtype), v, acc * keep[:, None])
    return higher, total, acc


def attend_rows(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor,
    scale: float,
    causal: bool,
    out: Tensor,
) -> Tensor:
    """`mstar.kernels.ops.paged_attend` for rows of any length."""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    rows = kv_lens.shape[0]
    if not serves(q, k_pages, v_pages, block_table, out) or rows > 4096:
        return NotImplemented
    if tokens == 0 or rows == 0:
        return out
    dim = max(16, next_power_of_2(head_dim))
    tile = _WIDE if dim > 128 else _NARROW
    tiles = triton.cdiv(tokens, tile.queries) + rows  # at most: each row may end within a tile
    _attend_kernel[(tiles, heads)](
        q, k_pages, v_pages, block_table, kv_lens, q_starts, out, scale * _LOG2_E, rows,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_pages.stride(0), k_pages.stride(1),
        block_table.stride(0), GROUP=heads // kv_heads, HEAD_DIM=head_dim, DIM=dim,
        QUERIES=tile.queries, KEYS=tile.keys, PAGE_SIZE=page_size, ROWS=next_power_of_2(rows), CAUSAL=causal,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent_launch(q),
    )  # fmt: skip
    return out
