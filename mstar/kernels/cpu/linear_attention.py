"""Calls into the compiled kernels of a gated delta net; the rules are those of `mstar.kernels.cpu.native`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mstar.kernels.cpu.layout import is_index, is_token_columns, is_wide
from mstar.kernels.cpu.library import Library

_BF16 = torch.bfloat16


class LinearAttentionKernels:
    """The operations of `mstar.kernels.linear_attention`."""

    def __init__(self, library: Library) -> None:
        self._gated_norm = library.call("mstar_gated_norm", "8qd4q")
        self._gated_delta = library.call("mstar_gated_delta", "26q")

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        if not (is_token_columns(x, x) and is_token_columns(z, x)):
            return NotImplemented
        if weight.dtype is not x.dtype or weight.dim() != 1 or not weight.is_contiguous():
            return NotImplemented
        (tokens, width), dim = x.shape, weight.shape[0]
        if out is None:
            out = torch.empty((tokens, width), dtype=x.dtype)
        if width % dim or z.shape != x.shape or out.shape != x.shape or not is_token_columns(out, x):
            raise ValueError(
                f"gated_rms_norm: x {tuple(x.shape)}, z {tuple(z.shape)}, heads of {dim}, "
                f"out {tuple(out.shape)} {out.dtype}"
            )
        self._gated_norm(
            torch.get_num_threads(), tokens, width // dim, dim, x.stride(0), z.stride(0), out.stride(0),
            x.dtype is _BF16, eps, x.data_ptr(), z.data_ptr(), weight.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def gated_delta(
        self,
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
    ) -> Any:
        if not (is_token_columns(qkv, qkv) and is_token_columns(b, qkv) and is_token_columns(a, qkv)):
            return NotImplemented
        if not (is_token_columns(out, qkv) and is_index(slots) and is_index(has_state) and is_index(q_starts)):
            return NotImplemented
        if not (is_wide(delta_state) and is_wide(a_log) and is_wide(dt_bias)):
            return NotImplemented
        for each in (conv_weight, conv_state):
            if each.dtype is not qkv.dtype or not each.is_contiguous():
                return NotImplemented
        (tokens, channels), rows = qkv.shape, slots.shape[0]
        num_slots, heads, key_dim, value_dim = delta_state.shape
        taps = conv_weight.shape[1]
        if conv_state.shape != (num_slots, taps - 1, channels):
            raise ValueError(f"gated_delta: slots {tuple(conv_state.shape)} beside {tuple(delta_state.shape)}")
        if heads % key_heads or channels != 2 * key_heads * key_dim + heads * value_dim:
            raise ValueError(
                f"gated_delta: {channels} channels, {key_heads} and {heads} heads of {key_dim} and {value_dim}"
            )
        if conv_weight.shape[0] != channels or a_log.shape != (heads,) or dt_bias.shape != (heads,):
            raise ValueError(f"gated_delta: weights {tuple(conv_weight.shape)}, {tuple(a_log.shape)}")
        if b.shape != (tokens, heads) or a.shape != b.shape or out.shape != (tokens, heads * value_dim):
            raise ValueError(f"gated_delta: b {tuple(b.shape)}, a {tuple(a.shape)}, out {tuple(out.shape)}")
        if has_state.shape != (rows,) or q_starts.shape != (rows + 1,):
            raise ValueError(f"gated_delta: {rows} rows, {has_state.shape[0]} flags, {q_starts.shape[0]} starts")
        self._gated_delta(
            torch.get_num_threads(), rows, tokens, num_slots, key_heads, heads, key_dim, value_dim, taps, qkv.stride(0),
            b.stride(0), a.stride(0), out.stride(0), qkv.dtype is _BF16, qkv.data_ptr(), b.data_ptr(), a.data_ptr(),
            conv_weight.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(), conv_state.data_ptr(), delta_state.data_ptr(),
            slots.data_ptr(), has_state.data_ptr(), q_starts.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out
