"""`FlaLinearAttention`: steps with prompts by the chunk kernels of flash-linear-attention, behind a kernel that makes
what they take and over states taken from their slots and put back; steps of single tokens as `GatedDeltaKernels`, by
one kernel over the slots.

Executor. Must not wait for the device. The library's entries for models are left out: for short prompts what they do on
the host takes longer than the kernels. It remembers what it derives from a tensor of row borders by the tensor's
identity, so every step brings one of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.layer_handles import GatedDeltaWeights
from mstar.engine.resources.linear_attention_backends import (
    GatedDeltaKernels,
    LayerStates,
    LinearAttentionMeta,
    LinearAttentionNeed,
)
from mstar.engine.resources.state_slots import SINK_SLOT
from mstar.kernels import ops
from mstar.kernels.fused_norms import GatedNorm

CHUNK = 64
"""Tokens that the kernels take together."""


class _Prompts(NamedTuple):
    """A step as the kernels want it, with a row of no tokens behind the others: `slots` [rows]; `starts` [rows + 1];
    `chunks` [chunks, 2] (row, chunk of the row); `chunk_starts` [rows + 1]; all int64. `has_state` int32 [rows];
    `begins` bool [rows, 1, 1, 1]."""

    slots: Tensor
    has_state: Tensor
    begins: Tensor
    starts: Tensor
    chunks: Tensor
    chunk_starts: Tensor


class _Kernels(NamedTuple):
    """`prepare` is ours, the others the library's: of each chunk alone, of the states from chunk to chunk, and of the
    results."""

    prepare: Callable[..., Any]
    within: Callable[..., Any]
    between: Callable[..., Any]
    results: Callable[..., Any]


class FlaLinearAttention(GatedDeltaKernels):
    """See the module docstring."""

    def __init__(self) -> None:
        super().__init__("fla", "cuda")

    def why_unavailable(self, need: LinearAttentionNeed) -> str | None:
        if (reason := super().why_unavailable(need)) is not None:
            return reason
        if need.dtype is not torch.bfloat16:
            return f"computes in bfloat16, not in {need.dtype}"
        if importlib.util.find_spec("fla") is None:
            return "flash-linear-attention is not installed (the extra `cuda`)"
        return None

    def begin(self, meta: LinearAttentionMeta, num_tokens: int) -> LinearAttentionMeta:
        return meta if meta.single else meta._replace(derived=_prompts(meta, num_tokens))

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
        norm: GatedNorm | None = None,
    ) -> None:
        if meta.single:
            super().mix(qkv, b, a, weights, states, key_heads, meta, out, norm)
            return
        kernels, prompts = _kernels(), meta.derived
        assert isinstance(prompts, _Prompts), "a step begins before its layers mix"
        slots, rows = prompts.slots, {"cu_seqlens": prompts.starts, "chunk_indices": prompts.chunks}
        inputs = kernels.prepare(
            qkv, b, a, *weights, states.conv, slots, prompts.has_state, prompts.starts, prompts.chunks, key_heads
        )
        decay = inputs.log2_decay
        state = states.delta.index_select(0, slots).masked_fill_(prompts.begins, 0).float()
        w, u, _ = kernels.within(k=inputs.k, v=inputs.v, g=decay, beta=inputs.beta, **rows)
        history, added, state = kernels.between(
            k=inputs.k,
            w=w,
            u=u,
            g=decay,
            initial_state=state,
            output_final_state=True,
            chunk_offsets=prompts.chunk_starts,
            **rows,
        )
        states.delta.index_copy_(0, slots, state.to(states.delta.dtype))
        scale = states.delta.shape[2] ** -0.5
        result = kernels.results(q=inputs.q, k=inputs.k, v=added, h=history, g=decay, scale=scale, **rows)
        result = result.view(out.shape)
        if norm is None:
            out.copy_(result)
        else:
            ops.gated_rms_norm(result, *norm, out=out)


def _prompts(meta: LinearAttentionMeta, num_tokens: int) -> _Prompts:
    """Of shapes that depend on those of the step alone: there are as many chunks as rows and tokens can have, and those
    that no row has belong to one of no tokens."""
    num_rows = meta.slots.shape[0]
    starts = functional.pad(meta.q_starts.long(), (0, 1))
    starts[-1] = starts[-2]
    has_state = functional.pad(meta.has_state, (0, 1))
    counts = (starts.diff() + CHUNK - 1).div(CHUNK, rounding_mode="floor")
    chunk_starts = functional.pad(counts.cumsum(0), (1, 0))
    chunk = torch.arange(num_tokens // CHUNK + num_rows, device=starts.device)
    row = (torch.searchsorted(chunk_starts, chunk, right=True) - 1).clamp_(max=num_rows)
    return _Prompts(
        slots=functional.pad(meta.slots.long(), (0, 1)).clamp_(min=SINK_SLOT),
        has_state=has_state,
        begins=(has_state == 0)[:, None, None, None],
        starts=starts,
        chunks=torch.stack([row, chunk - chunk_starts[row]], 1),
        chunk_starts=chunk_starts,
    )


@cache
def _kernels() -> _Kernels:
    """What is there on machines with an accelerator only, and takes seconds to import."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from fla.ops.common.chunk_o import chunk_fwd_o  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    from mstar.kernels.triton.delta_prompt import prepare_chunks  # noqa: PLC0415

    return _Kernels(prepare_chunks, chunk_gated_delta_rule_fwd_intra, chunk_gated_delta_rule_fwd_h, chunk_fwd_o)
