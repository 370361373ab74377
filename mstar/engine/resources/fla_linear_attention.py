"""`FlaLinearAttention`: steps with prompts by the chunk kernels of flash-linear-attention over states taken from their
slots and put back; steps of single tokens by the operation of `mstar.kernels.ops`, which is one kernel over the slots.

Executor. Must not wait for the device. The library remembers what it derives from a tensor of row borders by the
tensor's identity, so every step brings one of its own.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.layer_handles import GatedDeltaWeights
from mstar.engine.resources.attention_backends import why_elsewhere
from mstar.engine.resources.linear_attention_backends import (
    LayerStates,
    LinearAttentionMeta,
    LinearAttentionNeed,
    mix_by_ops,
)
from mstar.engine.resources.state_slots import SINK_SLOT

CHUNK = 64
"""Tokens that the kernels take together."""


class _Prompts(NamedTuple):
    """A step as the library wants it: `slots`, and `starts` [rows + 1]; `chunks` [chunks, 2] (row, chunk of the row);
    all int64. `begins` bool [rows].

    The convolution goes on with the inputs of the last `kernel - 1` tokens: `of_tokens` [rows * (kernel - 1)] are
    tokens of the step, `of_history` rows of what was remembered, `is_new` bool [rows, kernel - 1, 1] says which."""

    slots: Tensor
    begins: Tensor
    starts: Tensor
    chunks: Tensor
    of_tokens: Tensor
    of_history: Tensor
    is_new: Tensor


class FlaLinearAttention:
    """See the module docstring."""

    name = "fla"
    capturable = True

    def why_unavailable(self, need: LinearAttentionNeed) -> str | None:
        if (elsewhere := why_elsewhere("cuda", need.device_type)) is not None:
            return elsewhere
        if need.dtype is not torch.bfloat16:
            return f"computes in bfloat16, not in {need.dtype}"
        if need.key_dim > 256 or need.key_dim % 16 or need.value_dim % 16:
            return f"heads of multiples of 16 up to 256, not of {need.key_dim} and {need.value_dim}"
        if importlib.util.find_spec("fla") is None:
            return "flash-linear-attention is not installed (the extra `cuda`)"
        return None

    def begin(self, meta: LinearAttentionMeta, conv_kernel: int) -> LinearAttentionMeta:
        return meta if meta.single else meta._replace(derived=_prompts(meta, conv_kernel - 1))

    def mix(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        states: LayerStates,
        key_heads: int,
        meta: LinearAttentionMeta,
        out: Tensor,
    ) -> None:
        if meta.single:
            mix_by_ops(qkv, b, a, weights, states, key_heads, meta, out)
            return
        # An optional dependency that takes seconds to import.
        from fla.modules.causal_conv1d import causal_conv1d  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        prompts = meta.derived
        assert isinstance(prompts, _Prompts), "a step begins before its layers mix"
        slots, begins = prompts.slots, prompts.begins
        history = states.conv.index_select(0, slots).masked_fill_(begins[:, None, None], 0)
        # The library's window begins one input before what the convolution reads.
        window = functional.pad(history.transpose(1, 2), (1, 0))
        mixed, _ = causal_conv1d(
            qkv[None],
            weights.conv,
            initial_state=window,
            activation="silu",
            cu_seqlens=prompts.starts,
            chunk_indices=prompts.chunks,
        )
        states.conv.index_copy_(0, slots, _last_inputs(qkv, history, prompts))
        num_heads, key_dim, value_dim = states.delta.shape[1:]
        key_width = key_heads * key_dim
        q, k, v = mixed.split([key_width, key_width, num_heads * value_dim], -1)
        state = states.delta.index_select(0, slots).masked_fill_(begins[:, None, None, None], 0)
        result, state = chunk_gated_delta_rule(
            q.unflatten(-1, (key_heads, key_dim)),
            k.unflatten(-1, (key_heads, key_dim)),
            v.unflatten(-1, (num_heads, value_dim)),
            g=a[None],
            beta=b[None],
            scale=key_dim**-0.5,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=weights.a_log,
            dt_bias=weights.dt_bias,
            cu_seqlens=prompts.starts,
            chunk_indices=prompts.chunks,
        )
        states.delta.index_copy_(0, slots, state)
        out.copy_(result.view(out.shape))


def _prompts(meta: LinearAttentionMeta, past: int) -> _Prompts:
    """`past`: inputs that the convolution remembers."""
    starts = meta.q_starts.long()
    spans = starts.diff()[:, None]
    chunk_starts = functional.pad((spans.squeeze(1) + CHUNK - 1).div(CHUNK, rounding_mode="floor").cumsum(0), (1, 0))
    chunk = torch.arange(int((-(-meta.spans // CHUNK)).sum()), device=starts.device)
    row = torch.searchsorted(chunk_starts, chunk, right=True) - 1
    back = torch.arange(past, device=starts.device)[None]
    own_rows = torch.arange(spans.shape[0], device=starts.device)[:, None] * past
    return _Prompts(
        slots=meta.slots.long().clamp_(min=SINK_SLOT),
        begins=meta.has_state == 0,
        starts=starts,
        chunks=torch.stack([row, chunk - chunk_starts[row]], 1),
        of_tokens=(starts[1:, None] - past + back).clamp_(min=0).flatten(),
        of_history=(own_rows + (back + spans).clamp_(max=past - 1)).flatten(),
        is_new=(back + spans >= past).unsqueeze(2),
    )


def _last_inputs(qkv: Tensor, history: Tensor, prompts: _Prompts) -> Tensor:
    """`[rows, kernel - 1, channels]`: what the convolution goes on with after `qkv [tokens, channels]`, of rows that
    have remembered `history`, shaped alike."""
    fresh = qkv.index_select(0, prompts.of_tokens).view(history.shape)
    old = history.flatten(0, 1).index_select(0, prompts.of_history).view(history.shape)
    return torch.where(prompts.is_new, fresh, old)
