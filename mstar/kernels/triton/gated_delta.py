"""The gated delta rule over rows' states: convolution, gates, l2 norms and the state's update in one launch.

Runs on the thread of the forward. One program takes one value head of one row and goes through the row's tokens with
the state in registers; long prompts want a kernel that goes through them in chunks. Specified by
`mstar.kernels.reference_gated_delta.token_by_token`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.fused_norms import GatedNorm
from mstar.kernels.triton.launch import dependent_launch, let_next_start, wait_for_inputs
from mstar.kernels.triton.limits import why_no_delta
from mstar.kernels.triton.rows import gated_norm

_EARLY_ROWS = 32
_NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def _delta_kernel(
    qkv, b, a, conv_weight, a_log, dt_bias, conv_state, delta_state, slots, has_state, q_starts, out,
    z, norm_weight, eps, qkv_stride, b_stride, a_stride, weight_stride, tap_stride, conv_slot, delta_slot, out_stride,
    z_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, SINGLE: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`SINGLE` goes without the loop, which costs twice the registers even where it turns once. `EARLY` reads the state
    before the wait: what comes before made it in an earlier step."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    i = tl.arange(0, DIM)
    decay_rate = tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    let_next_start(PDL)
    if not EARLY:
        wait_for_inputs(PDL)
    begin = tl.load(q_starts + row)
    end = tl.load(q_starts + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    flag = tl.load(has_state + row)
    # No branch around the loads: what they need is here, and each branch would add a look at memory to wait for.
    num_owned = tl.where((slot >= 0) & (begin < end), DIM, 0)
    num_known = tl.where(flag != 0, num_owned, 0)
    state_at = delta_state + slot * delta_slot + (head * DIM + i)[:, None] * DIM + i[None, :]
    state = tl.load(state_at, mask=(i < num_known)[:, None], other=0.0).to(tl.float32)
    if EARLY:
        wait_for_inputs(PDL)
    history = conv_state + slot * conv_slot
    if SINGLE:
        state = _turn(
            state, qkv, b, a, conv_weight, history, out, decay_rate, bias, num_owned, num_known,
            begin, begin + 1, begin.to(tl.int64), head, tl.where(begin < end, DIM, 0), qkv_stride, b_stride, a_stride,
            weight_stride, tap_stride, out_stride, z, norm_weight, eps, z_stride,
            KEY_HEADS, VALUE_HEADS, DIM, True, NORM,
        )  # fmt: skip
    else:
        for turn in range(end - begin):
            state = _turn(
                state, qkv, b, a, conv_weight, history, out, decay_rate, bias, num_owned, num_known,
                begin, end, begin.to(tl.int64) + turn, head, DIM, qkv_stride, b_stride, a_stride,
                weight_stride, tap_stride, out_stride, z, norm_weight, eps, z_stride,
                KEY_HEADS, VALUE_HEADS, DIM, False, NORM,
            )  # fmt: skip
    tl.store(state_at, state.to(delta_state.dtype.element_ty), mask=(i < num_owned)[:, None])


@triton.jit
def _turn(
    state, qkv, b, a, conv_weight, history, out, decay_rate, bias, num_owned, num_known,
    begin, end, token, head, num_out, qkv_stride, b_stride, a_stride, weight_stride, tap_stride, out_stride,
    z, norm_weight, eps, z_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, SINGLE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head of one token: stores its result, moves the convolution's state on after the row's last token, and
    returns the state of the rule."""
    PER: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DIM + VALUE_HEADS * DIM
    # With several value heads to a key head their programs share channels, whose state is then moved afterwards.
    FIRST_MOVED: tl.constexpr = 0 if PER == 1 else 2
    i = tl.arange(0, DIM)
    # Channels of queries, keys and values as one tile. As three vectors, each shorter than the program has threads,
    # their loads would be repeated in every lane, which costs twice the registers.
    kind = tl.arange(0, 4)[:, None]
    first = tl.where(kind == 2, 2 * KEY_HEADS * DIM + head * DIM, kind * KEY_HEADS * DIM + (head // PER) * DIM)
    channel = first + i[None, :]
    # All loads come before any store: a load behind a store of what another load brought would wait for that.
    x0 = _input(qkv, history, channel, kind, i, token - 3, begin, num_known, qkv_stride, CHANNELS, SINGLE)
    x1 = _input(qkv, history, channel, kind, i, token - 2, begin, num_known, qkv_stride, CHANNELS, SINGLE)
    x2 = _input(qkv, history, channel, kind, i, token - 1, begin, num_known, qkv_stride, CHANNELS, SINGLE)
    x3 = tl.load(qkv + token * qkv_stride + channel, mask=(kind < 3) & (i < num_owned)[None, :], other=0.0)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    step = tl.load(a + token * a_stride + head).to(tl.float32) + bias
    if NORM:
        gate = tl.load(z + token * z_stride + head * DIM + i, mask=i < num_out, other=0.0).to(tl.float32)
        scale = tl.load(norm_weight + i).to(tl.float32)
    weight = conv_weight + channel * weight_stride
    is_channel = (kind < 3) & (i >= 0)[None, :]
    mixed = tl.load(weight, mask=is_channel, other=0.0).to(tl.float32) * x0.to(tl.float32)
    mixed += tl.load(weight + tap_stride, mask=is_channel, other=0.0).to(tl.float32) * x1.to(tl.float32)
    mixed += tl.load(weight + 2 * tap_stride, mask=is_channel, other=0.0).to(tl.float32) * x2.to(tl.float32)
    mixed += tl.load(weight + 3 * tap_stride, mask=is_channel, other=0.0).to(tl.float32) * x3.to(tl.float32)
    num_moved = tl.where(token == end - 1, num_owned, 0)
    is_moved = (kind >= FIRST_MOVED) & (kind < 3) & (i < num_moved)[None, :]
    tl.store(history + channel, x1, mask=is_moved)
    tl.store(history + CHANNELS + channel, x2, mask=is_moved)
    tl.store(history + 2 * CHANNELS + channel, x3, mask=is_moved)
    mixed = mixed * tl.sigmoid(mixed)
    q = tl.sum(tl.where(kind == 0, mixed, 0.0), 0)
    k = tl.sum(tl.where(kind == 1, mixed, 0.0), 0)
    v = tl.sum(tl.where(kind == 2, mixed, 0.0), 0)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + _NORM_EPS) * (DIM**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + _NORM_EPS)
    decay = tl.exp(-decay_rate * _softplus(step))
    # Both products with the state in one pass over it: (decay·S + k⊗d)ᵀq = decay·Sᵀq + (k·q)·d.
    along_k = tl.sum(state * k[:, None], 0)
    along_q = tl.sum(state * q[:, None], 0)
    added = (v - decay * along_k) * beta
    result = tl.where(num_owned > 0, decay * along_q + tl.sum(k * q, 0) * added, 0.0)
    if NORM:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        result = gated_norm(result, gate, scale, eps, DIM, out.dtype.element_ty)
    tl.store(out + token * out_stride + head * DIM + i, result.to(out.dtype.element_ty), mask=i < num_out)
    return state * decay + k[:, None] * added[None, :]


@triton.jit
def _input(
    qkv, history, channel, kind, i, source, begin, num_known, qkv_stride, CHANNELS: tl.constexpr, SINGLE: tl.constexpr
):
    """What the convolution saw at token ``source``, which may lie before the row's first."""
    past = history + (3 + source - begin) * CHANNELS + channel
    if SINGLE:
        return tl.load(past, mask=(kind < 3) & (i < num_known)[None, :], other=0.0)
    else:
        num_new = tl.where(source >= begin, 3, 0)
        num_old = tl.where(num_known > 0, 3 - num_new, 0)
        is_lane = (i >= 0)[None, :]
        new = tl.load(qkv + source * qkv_stride + channel, mask=(kind < num_new) & is_lane, other=0.0)
        return new + tl.load(past, mask=(kind < num_old) & is_lane, other=0.0)


@triton.jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    # Below, 1 + small keeps few of its bits, and the series needs few terms.
    series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0)))
    return tl.maximum(x, 0.0) + tl.where(small < 0.02, series, tl.log(1.0 + small))


@triton.jit
def _move_history_kernel(
    qkv, conv_state, slots, has_state, q_starts, qkv_stride, conv_slot, num_channels,
    CHANNELS: tl.constexpr, PAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns of the convolution's state of the first ``num_channels`` of ``CHANNELS`` channels."""
    wait_for_inputs(PDL)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    begin = tl.load(q_starts + row)
    end = tl.load(q_starts + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (begin < end):
        known = tl.load(has_state + row) != 0
        history = conv_state + slot * conv_slot + channel
        for column in tl.static_range(PAST):
            source = end - PAST + column
            num_new = tl.where(source >= begin, num_channels, 0)
            x = tl.load(qkv + source.to(tl.int64) * qkv_stride + channel, mask=channel < num_new, other=0.0)
            old = (PAST + source - begin) * CHANNELS
            num_old = tl.where(known, num_channels - num_new, 0)
            x += tl.load(history + old, mask=channel < num_old, other=0.0)
            tl.store(history + column * CHANNELS, x, mask=channel < num_channels)


def gated_delta(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    delta_state: Tensor,
    slots: Tensor,
    has_state: Tensor,
    q_starts: Tensor,
    key_heads: int,
    out: Tensor,
    max_tokens: int | None,
    norm: GatedNorm | None,
) -> Tensor:
    """`mstar.kernels.ops.gated_delta`, for heads as wide in keys as in values and a convolution of four taps."""
    value_heads, dim, value_dim = delta_state.shape[1:]
    past, channels = conv_state.shape[1:]
    rows = slots.shape[0]
    inner = (qkv.stride(1), b.stride(1), a.stride(1), out.stride(1))
    if inner != (1,) * 4 or why_no_delta(dim, value_dim, past + 1) is not None:
        return NotImplemented
    if not (delta_state[0].is_contiguous() and conv_state[0].is_contiguous()) or conv_state.dtype != qkv.dtype:
        return NotImplemented
    if norm is not None and (norm.z.stride(1) != 1 or norm.weight.stride(0) != 1):
        return NotImplemented
    if rows == 0 or qkv.shape[0] == 0:
        return out
    launch = dependent_launch(qkv)
    _delta_kernel[(value_heads, rows)](
        qkv, b, a, conv_weight, a_log, dt_bias, conv_state, delta_state, slots, has_state, q_starts, out,
        out if norm is None else norm.z, out if norm is None else norm.weight, 0.0 if norm is None else norm.eps,
        qkv.stride(0), b.stride(0), a.stride(0), *conv_weight.stride(), conv_state.stride(0), delta_state.stride(0),
        out.stride(0), 0 if norm is None else norm.z.stride(0),
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, DIM=dim, SINGLE=max_tokens == 1, NORM=norm is not None,
        EARLY=rows <= _EARLY_ROWS, num_warps=4, **launch,
    )  # fmt: skip
    if value_heads != key_heads:
        shared = 2 * key_heads * dim
        _move_history_kernel[(triton.cdiv(shared, 1024), rows)](
            qkv, conv_state, slots, has_state, q_starts, qkv.stride(0), conv_state.stride(0), shared,
            CHANNELS=channels, PAST=past, BLOCK=1024, num_warps=4, **launch,
        )  # fmt: skip
    return out
