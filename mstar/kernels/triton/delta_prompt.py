"""What comes before the chunks of a gated delta rule over prompts: the convolution with its memory, silu, l2 norms of
queries and keys, and gates summed up over each chunk, in one launch; and the convolution's memory after the step.

Runs on the thread of the forward. Rows are cut into chunks of `CHUNK` tokens from their own first one, so what a chunk
gives does not depend on where a prompt was cut, if it was at a multiple of that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
PAST = 3
"""Inputs that the convolution remembers: it has four taps."""
_NORM_EPS = tl.constexpr(1e-6)
_LOG2_E = tl.constexpr(1.4426950408889634)
_COLUMNS = 1024
_TILE = 32
"""Tokens of a program: few, so that enough programs find registers."""


class ChunkInputs(NamedTuple):
    """`q`, `k` `[1, tokens, key heads, dim]` of length one, `v [1, tokens, value heads, dim]`, in the dtype of the
    inputs; `log2_decay`: base 2, summed up from the begin of each chunk, and `beta`, fp32 `[1, tokens, value heads]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log2_decay: Tensor
    beta: Tensor


@triton.jit
def _prepare_kernel(
    qkv, b, a, conv_weight, a_log, dt_bias, conv_state, slots, has_state, starts, chunks, q, k, v, log2_decay, beta,
    qkv_stride, b_stride, a_stride, weight_stride, tap_stride, conv_slot,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: `TILE` tokens of one chunk of one head's queries, keys or values."""
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * DIM
    chunk = tl.program_id(0) // (TOKENS // TILE)
    tile = tl.program_id(0) % (TOKENS // TILE)
    head = tl.program_id(1)
    row = tl.load(chunks + 2 * chunk)
    first = tl.load(chunks + 2 * chunk + 1) * TOKENS
    begin = tl.load(starts + row)
    length = tl.load(starts + row + 1) - begin
    if first + tile * TILE < length:
        lane = tl.arange(0, DIM)
        channel = head * DIM + lane
        every = (channel >= 0)[None, :]
        place = first + tile * TILE + tl.arange(0, TILE)  # in the row
        inside = place < length
        mixed = tl.zeros([TILE, DIM], tl.float32)
        for tap in tl.static_range(4):
            source = place + (tap - 3)
            x = tl.load(
                qkv + (begin + source)[:, None] * qkv_stride + channel[None, :],
                mask=(inside & (source >= 0))[:, None] & every,
                other=0.0,
            )
            weight = tl.load(conv_weight + channel * weight_stride + tap * tap_stride).to(tl.float32)
            mixed += weight[None, :] * x.to(tl.float32)
        if first + tile == 0:
            if tl.load(has_state + row) != 0:
                history = conv_state + tl.load(slots + row) * conv_slot
                for tap in tl.static_range(3):
                    source = place + (tap - 3)
                    x = tl.load(
                        history + (3 + source)[:, None] * CHANNELS + channel[None, :],
                        mask=(source < 0)[:, None] & every,
                        other=0.0,
                    )
                    weight = tl.load(conv_weight + channel * weight_stride + tap * tap_stride).to(tl.float32)
                    mixed += weight[None, :] * x.to(tl.float32)
        mixed = mixed * tl.sigmoid(mixed)
        token = begin + place
        if head < 2 * KEY_HEADS:
            mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 1) + _NORM_EPS)[:, None]
            to = q
            if head >= KEY_HEADS:
                to = k
            at = token[:, None] * (KEY_HEADS * DIM) + (head % KEY_HEADS) * DIM + lane[None, :]
            tl.store(to + at, mixed.to(q.dtype.element_ty), mask=inside[:, None] & every)
        else:
            value_head = head - 2 * KEY_HEADS
            at = token[:, None] * (VALUE_HEADS * DIM) + value_head * DIM + lane[None, :]
            tl.store(v + at, mixed.to(v.dtype.element_ty), mask=inside[:, None] & every)
            if tile == 0:
                whole = first + tl.arange(0, TOKENS)
                exists = whole < length
                each = begin + whole
                step = tl.load(a + each * a_stride + value_head, mask=exists, other=0.0).to(tl.float32)
                step += tl.load(dt_bias + value_head)
                softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
                decay = tl.where(exists, -tl.exp(tl.load(a_log + value_head)) * softplus, 0.0)
                gate = tl.load(b + each * b_stride + value_head, mask=exists, other=0.0).to(tl.float32)
                tl.store(log2_decay + each * VALUE_HEADS + value_head, tl.cumsum(decay, 0) * _LOG2_E, mask=exists)
                tl.store(beta + each * VALUE_HEADS + value_head, tl.sigmoid(gate), mask=exists)


@triton.jit
def _remember_kernel(
    qkv, conv_state, slots, has_state, starts, qkv_stride, conv_slot, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program: some channels of one row. A thread keeps to its channels, so it has read what it overwrites."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    oldest = tl.where(tl.load(has_state + row) != 0, begin - 3, begin)
    history = conv_state + tl.load(slots + row) * conv_slot
    x0 = _remembered(qkv, history, channel, end - 3, begin, oldest, qkv_stride, CHANNELS)
    x1 = _remembered(qkv, history, channel, end - 2, begin, oldest, qkv_stride, CHANNELS)
    x2 = _remembered(qkv, history, channel, end - 1, begin, oldest, qkv_stride, CHANNELS)
    mask = channel < tl.where(end > begin, CHANNELS, 0)
    tl.store(history + channel, x0, mask=mask)
    tl.store(history + CHANNELS + channel, x1, mask=mask)
    tl.store(history + 2 * CHANNELS + channel, x2, mask=mask)


@triton.jit
def _remembered(qkv, history, channel, source, begin, oldest, qkv_stride, CHANNELS: tl.constexpr):
    num_new = tl.where(source >= begin, CHANNELS, 0)
    num_old = tl.where((source < begin) & (source >= oldest), CHANNELS, 0)
    new = tl.load(qkv + source * qkv_stride + channel, mask=channel < num_new, other=0.0)
    return new + tl.load(history + (3 + source - begin) * CHANNELS + channel, mask=channel < num_old, other=0.0)


def prepare_chunks(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_state: Tensor,
    starts: Tensor,
    chunks: Tensor,
    key_heads: int,
) -> ChunkInputs:
    """Arguments as of `mstar.kernels.ops.gated_delta`, with int64 `slots` (none negative), `starts [rows + 1]` and
    `chunks [chunks, 2]`: row, and number of the chunk in it. Moves `conv_state` on by the rows' tokens."""
    heads = a_log.shape[0]
    dim = conv_state.shape[2] // (2 * key_heads + heads)
    tokens = qkv.shape[0]
    q, k = (qkv.new_empty(1, tokens, key_heads, dim) for _ in range(2))
    v = qkv.new_empty(1, tokens, heads, dim)
    log2_decay, beta = (torch.empty((1, tokens, heads), dtype=torch.float32, device=qkv.device) for _ in range(2))
    _prepare_kernel[(chunks.shape[0] * (CHUNK // _TILE), 2 * key_heads + heads)](
        qkv, b, a, conv_weight, a_log, dt_bias, conv_state, slots, has_state, starts, chunks, q, k, v, log2_decay, beta,
        qkv.stride(0), b.stride(0), a.stride(0), *conv_weight.stride(), conv_state.stride(0),
        KEY_HEADS=key_heads, VALUE_HEADS=heads, DIM=dim, TOKENS=CHUNK, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    channels = conv_state.shape[2]
    _remember_kernel[(slots.shape[0], triton.cdiv(channels, _COLUMNS))](
        qkv, conv_state, slots, has_state, starts, qkv.stride(0), conv_state.stride(0),
        CHANNELS=channels, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return ChunkInputs(q, k, v, log2_decay, beta)
