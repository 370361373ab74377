"""`Attention`: attention over a paged cache, by one backend. Keeps nothing between steps.

`plan` on the loop thread; the layer handles (see `mstar.engine.layer_handles.AttentionHandle`) run in forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.engine.layer_handles import RotaryHandle
from mstar.engine.resources.attention_backends import AttentionBackend, AttentionMeta, AttentionNeed, HostRows
from mstar.engine.resources.attention_choice import choose_backend
from mstar.engine.resources.base import OpenConfig, Resource, StepContext
from mstar.engine.resources.paged_kv import LayerPages, PagedKV
from mstar.engine.spec import AttentionSpec
from mstar.engine.staging import StagingField
from mstar.engine.step import AttentionStep
from mstar.kernels import ops
from mstar.kernels.fused_norms import HeadNorms


class AttentionFacts(NamedTuple):
    """Host facts of one step. `planned`: as in `AttentionMeta`."""

    causal: bool
    rows: HostRows
    planned: bool


class _Current:
    """What the layer handles of one resource share: the running step."""

    __slots__ = ("meta",)

    def __init__(self) -> None:
        self.meta: AttentionMeta | None = None


class LayerAttention:
    """Handle of one layer."""

    __slots__ = ("_backend", "_current", "_head_dim", "_num_heads", "_pages")

    def __init__(self, backend: AttentionBackend, pages: LayerPages, num_heads: int, current: _Current) -> None:
        self._backend = backend
        self._pages = pages
        self._num_heads = num_heads
        self._head_dim = pages.k.shape[3]
        self._current = current

    def attend(
        self, qkv: Tensor, rotary: RotaryHandle | None, out: Tensor | None = None, norms: HeadNorms | None = None
    ) -> Tensor:
        meta = self._current.meta
        assert meta is not None, "attention outside a step"
        num_heads, head_dim = self._num_heads, self._head_dim
        if meta.write:
            self._backend.write_kv(qkv, num_heads, self._pages, rotary, meta, norms)
        else:
            if norms is not None:
                ops.norm_heads(qkv, norms, num_heads, self._pages.k.shape[2], head_dim)
            if rotary is not None:
                self._rotate_queries(qkv, rotary)
        if out is None:
            out = torch.empty((qkv.shape[0], num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
        q = qkv.view(qkv.shape[0], -1, head_dim)[:, :num_heads]
        self._backend.attend(q, self._pages, meta, out.view(qkv.shape[0], num_heads, head_dim))
        return out

    def _rotate_queries(self, qkv: Tensor, rotary: RotaryHandle) -> None:
        ops.rope(qkv, rotary.positions, rotary.cos, rotary.sin, self._num_heads, self._head_dim, rotary.axes)


class Attention(Resource[AttentionStep]):
    """`backend`: the deployment's choice, None for the platform's."""

    def __init__(self, spec: AttentionSpec, kv: PagedKV, *, backend: str | None, device: torch.device) -> None:
        self.key = spec.key
        self.reads = (spec.kv_key,)
        self.kv = kv
        self._num_heads = spec.num_heads
        self._scale = kv.spec.head_dim**-0.5 if spec.scale is None else spec.scale
        if spec.num_heads % kv.spec.num_kv_heads:
            raise ValueError(
                f"attention {spec.key!r}: {spec.num_heads} heads over {kv.spec.num_kv_heads} key-value heads of "
                f"{spec.kv_key!r}; the first must be a multiple of the second"
            )
        need = AttentionNeed(
            device.type, kv.layer(0).k.dtype, spec.num_heads, kv.spec.num_kv_heads, kv.spec.head_dim, kv.spec.page_size
        )
        self.backend = choose_backend(spec.key, need, backend, device)
        self._current = _Current()
        self._q_starts = spec.key + ".q_starts"
        self._numbers = np.arange(64, dtype=np.int32)

    def open(self, handle: int, config: OpenConfig) -> None:
        """Nothing of its own."""

    def close(self, handle: int) -> None:
        """Nothing of its own."""

    def plan(self, step: AttentionStep, ctx: StepContext) -> AttentionFacts:
        starts = ctx.staging[self._q_starts]
        n, num_tokens = ctx.rows.handles.size, ctx.num_tokens
        key = self.kv.key
        table, lens = ctx.staging[key + ".block_table"][:n], ctx.staging[key + ".kv_lens"][:n]
        facts = AttentionFacts(step.causal, HostRows(table, lens, starts[: n + 1], ctx.single), not ctx.captured)
        if ctx.single and starts.size == num_tokens + 1:
            starts[:] = self._count_up(starts.size)
            return facts
        starts[0] = 0
        ctx.rows.spans.cumsum(dtype=np.int32, out=starts[1 : n + 1])
        if padding := starts.size - n - 1:  # a padding row has one token, as far as there are padding tokens
            starts[n + 1 :] = np.minimum(np.arange(num_tokens + 1, num_tokens + 1 + padding), ctx.shape.tokens)
        return facts

    def _count_up(self, size: int) -> np.ndarray:
        """0, 1, 2, ..."""
        if size > self._numbers.size:
            self._numbers = np.arange(2 * size, dtype=np.int32)
        return self._numbers[:size]

    def capturable(self, plan: AttentionFacts, captured: AttentionFacts) -> bool:
        return self.backend.capturable and plan.causal == captured.causal

    def narrow(self, plan: AttentionFacts, begin: int, end: int) -> AttentionFacts:
        table, lens, starts, single = plan.rows
        own = starts[begin : end + 1] - starts[begin]
        # Of any number of pieces: a backend keeps no more plans at a time than there are steps on their way.
        return plan._replace(rows=HostRows(table[begin:end], lens[begin:end], own, single), planned=False)

    def layer(self, index: int) -> LayerAttention:
        return LayerAttention(self.backend, self.kv.layer(index), self._num_heads, self._current)

    def staging_fields(self) -> Sequence[StagingField]:
        return (StagingField(self._q_starts, "int32", "border"),)

    def begin_forward(self, plan: AttentionFacts, staging: Mapping[str, Tensor]) -> None:
        key = self.kv.key
        self._current.meta = AttentionMeta(
            staging[key + ".block_table"],
            staging[key + ".kv_lens"],
            staging[self._q_starts],
            staging[key + ".slots"],
            self._scale,
            plan.causal,
            self.kv.writing,
            plan.rows,
            plan.planned,
        )
        self.backend.plan(self._current.meta)
