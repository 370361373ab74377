"""Rotary embedding and cache writes in one pass over the packed queries, keys and values.

Runs on the thread of the forward. One program takes one head of some tokens: it may normalize the head, rotates it in
place and, if it is a key or a value, stores it at the token's slot.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.fused_norms import HeadNorms
from mstar.kernels.triton.launch import dependent_launch, next_power_of_2, wait_for_inputs

_TOKENS = 4
"""Of a program. The same for all sizes, for the sake of bits that do not depend on the batch."""


@triton.jit
def _head_kernel(
    qkv, positions, axes, cos, sin, slots, k_pages, v_pages, q_weight, k_weight, eps,
    num_tokens, token_stride, position_stride, max_position, page_stride, slot_stride, q_heads, kv_heads,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    PAGE_SIZE: tl.constexpr, AXES: tl.constexpr, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    exists = token < num_tokens
    head = tl.program_id(1)
    wait_for_inputs(PDL)
    at = qkv + token * token_stride + head * HEAD_DIM
    # Two halves of the rotated part and the rest: a thread then writes only what it has read itself.
    i = tl.arange(0, BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, REST)[None, :]
    in_half, in_rest = exists & (i < HALF), exists & (rest < HEAD_DIM)
    a = tl.load(at + i, mask=in_half, other=0.0)
    b = tl.load(at + HALF + i, mask=in_half, other=0.0)
    c = tl.load(at + rest, mask=in_rest, other=0.0)
    if head < q_heads + kv_heads:
        if NORM:
            weight = k_weight
            if head < q_heads:
                weight = q_weight
            wide_a, wide_b, wide_c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
            squares = tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1) + tl.sum(wide_c * wide_c, 1)
            scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            a = _scaled(wide_a * scale, weight + i, i < HALF, ZERO_CENTERED, qkv.dtype.element_ty)
            b = _scaled(wide_b * scale, weight + HALF + i, i < HALF, ZERO_CENTERED, qkv.dtype.element_ty)
            c = _scaled(wide_c * scale, weight + rest, rest < HEAD_DIM, ZERO_CENTERED, qkv.dtype.element_ty)
            tl.store(at + rest, c, mask=in_rest)
        if AXES:
            axis = tl.load(axes + i, mask=i < HALF, other=0)
            position = tl.load(positions + token * position_stride + axis, mask=in_half, other=0)
        else:
            position = tl.load(positions + token * position_stride, mask=exists, other=0) + 0 * i
        known = in_half & (position >= 0) & (position < max_position)
        turn = position.to(tl.int64) * HALF + i
        cosine = tl.load(cos + turn, mask=known, other=0.0)
        sine = tl.load(sin + turn, mask=known, other=0.0)
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = (wide_a * cosine - wide_b * sine).to(qkv.dtype.element_ty)
        b = (wide_b * cosine + wide_a * sine).to(qkv.dtype.element_ty)
        tl.store(at + i, a, mask=in_half)
        tl.store(at + HALF + i, b, mask=in_half)
    if WRITE:
        if head >= q_heads:
            slot = tl.load(slots + token, mask=exists, other=-1)
            pages = k_pages
            kv_head = head - q_heads
            if head >= q_heads + kv_heads:
                pages = v_pages
                kv_head = head - q_heads - kv_heads
            to = pages + (slot // PAGE_SIZE).to(tl.int64) * page_stride + (slot % PAGE_SIZE) * slot_stride
            to += kv_head * HEAD_DIM
            tl.store(to + i, a.to(k_pages.dtype.element_ty), mask=in_half & (slot >= 0))
            tl.store(to + HALF + i, b.to(k_pages.dtype.element_ty), mask=in_half & (slot >= 0))
            tl.store(to + rest, c.to(k_pages.dtype.element_ty), mask=in_rest & (slot >= 0))


@triton.jit
def _scaled(normalized, weight, inside, ZERO_CENTERED: tl.constexpr, DTYPE: tl.constexpr):
    scale = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        return (normalized * (1.0 + scale)).to(DTYPE)
    else:
        return (normalized.to(DTYPE).to(tl.float32) * scale).to(DTYPE)


def rope(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, num_heads: int, head_dim: int, axes: Tensor | None
) -> Tensor:
    """`mstar.kernels.ops.rope`."""
    return _launch(qkv, positions, cos, sin, None, None, None, num_heads, 0, head_dim, axes, None)


def rope_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    num_q_heads: int,
    axes: Tensor | None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`mstar.kernels.ops.rope_write_kv`; with norms, those of queries and keys before it."""
    kv_heads, head_dim = k_pages.shape[2:]
    return _launch(qkv, positions, cos, sin, slots, k_pages, v_pages, num_q_heads, kv_heads, head_dim, axes, norms)


def _launch(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor | None,
    k_pages: Tensor | None,
    v_pages: Tensor | None,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    axes: Tensor | None,
    norms: HeadNorms | None,
) -> Tensor:
    tables = cos.is_contiguous() and sin.is_contiguous() and (axes is None or axes.is_contiguous())
    if qkv.dim() != 2 or qkv.stride(1) != 1 or not tables or (axes is not None and positions.stride(1) != 1):
        return NotImplemented
    if k_pages is not None and v_pages is not None and not (has_plain_slots(k_pages) and has_plain_slots(v_pages)):
        return NotImplemented
    if k_pages is not None and v_pages is not None and k_pages.stride() != v_pages.stride():
        return NotImplemented
    tokens, half = qkv.shape[0], cos.shape[1]
    if tokens == 0:
        return qkv
    writes = k_pages is not None
    _head_kernel[(triton.cdiv(tokens, _TOKENS), q_heads + (2 * kv_heads if writes else 0))](
        qkv, positions, positions if axes is None else axes, cos, sin, slots if writes else positions,
        k_pages if writes else qkv, v_pages if writes else qkv,
        qkv if norms is None else norms.q_weight, qkv if norms is None else norms.k_weight,
        0.0 if norms is None else norms.eps, tokens, qkv.stride(0), positions.stride(0), cos.shape[0],
        k_pages.stride(0) if k_pages is not None else 0, k_pages.stride(1) if k_pages is not None else 0,
        q_heads, kv_heads, TOKENS=_TOKENS, HEAD_DIM=head_dim, HALF=half, BLOCK=next_power_of_2(half),
        REST=next_power_of_2(max(1, head_dim - 2 * half)), PAGE_SIZE=k_pages.shape[1] if k_pages is not None else 1,
        AXES=axes is not None, NORM=norms is not None,
        ZERO_CENTERED=norms is not None and norms.zero_centered, WRITE=writes, num_warps=2,
        **dependent_launch(qkv),
    )  # fmt: skip
    return qkv


@triton.jit
def _write_kernel(
    k, v, k_pages, v_pages, slots, k_token, k_head, v_token, v_head, page_stride, slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < HEAD_DIM
    slot = tl.load(slots + token)
    if slot >= 0:
        to = (slot // PAGE_SIZE).to(tl.int64) * page_stride + (slot % PAGE_SIZE) * slot_stride + head * HEAD_DIM + i
        key = tl.load(k + token * k_token + head * k_head + i, mask=inside, other=0.0)
        value = tl.load(v + token * v_token + head * v_head + i, mask=inside, other=0.0)
        tl.store(k_pages + to, key.to(k_pages.dtype.element_ty), mask=inside)
        tl.store(v_pages + to, value.to(v_pages.dtype.element_ty), mask=inside)


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> Any:
    """`mstar.kernels.ops.write_kv`."""
    if k.stride(2) != 1 or v.stride(2) != 1 or not (has_plain_slots(k_pages) and has_plain_slots(v_pages)):
        return NotImplemented
    if k_pages.stride() != v_pages.stride():
        return NotImplemented
    tokens, heads, head_dim = k.shape
    if tokens:
        _write_kernel[(tokens, heads)](
            k, v, k_pages, v_pages, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_pages.stride(0), k_pages.stride(1), HEAD_DIM=head_dim, BLOCK=next_power_of_2(head_dim),
            PAGE_SIZE=k_pages.shape[1], num_warps=1, **dependent_launch(k),
        )  # fmt: skip
    return None


def has_plain_slots(pages: Tensor) -> bool:
    """True when the heads of a slot of ``pages [pages, page_size, kv_heads, head_dim]`` follow each other."""
    return pages.stride(3) == 1 and (pages.stride(2) == pages.shape[3] or pages.shape[2] == 1)
