"""`LinearAttention`: the gated delta rule over a pool of recurrent states, by one backend. Keeps nothing between steps.

`plan` on the loop thread; the layer handles (see `mstar.engine.layer_handles.LinearAttentionHandle`) run in forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.engine.layer_handles import GatedDeltaWeights
from mstar.engine.resources.base import OpenConfig, Resource, StepContext
from mstar.engine.resources.linear_attention_backends import (
    LayerStates,
    LinearAttentionBackend,
    LinearAttentionMeta,
    LinearAttentionNeed,
)
from mstar.engine.resources.linear_attention_choice import choose_backend
from mstar.engine.resources.recurrent_state_pool import RecurrentStatePool
from mstar.engine.spec import LinearAttentionSpec, StateBlock
from mstar.engine.staging import StagingField
from mstar.engine.step import LinearAttentionStep
from mstar.kernels.fused_norms import GatedNorm

CONV, DELTA = "conv", "delta"
"""Names of the state blocks."""


class LinearAttentionFacts(NamedTuple):
    """Of one step: whether each row has one token."""

    single: bool


class _Current:
    """What the layer handles of one resource share: the running step."""

    __slots__ = ("meta",)

    def __init__(self) -> None:
        self.meta: LinearAttentionMeta | None = None


class LayerLinearAttention:
    """Handle of one layer. `begins`: it is the first of a forward, and derives what all need of the step: in the
    forward, so that a captured one does it anew in every replay."""

    __slots__ = ("_backend", "_begins", "_current", "_num_key_heads", "_states", "_width")

    def __init__(
        self,
        backend: LinearAttentionBackend,
        states: LayerStates,
        spec: LinearAttentionSpec,
        current: _Current,
        *,
        begins: bool,
    ) -> None:
        self._backend = backend
        self._states = states
        self._num_key_heads = spec.num_key_heads
        self._width = spec.num_value_heads * spec.value_dim
        self._current = current
        self._begins = begins

    def mix(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        out: Tensor | None = None,
        norm: GatedNorm | None = None,
    ) -> Tensor:
        meta = self._current.meta
        assert meta is not None, "linear attention outside a step"
        if self._begins:
            meta = self._current.meta = self._backend.begin(meta, qkv.shape[0])
        if out is None:
            out = torch.empty((qkv.shape[0], self._width), dtype=qkv.dtype, device=qkv.device)
        self._backend.mix(qkv, b, a, weights, self._states, self._num_key_heads, meta, out, norm)
        return out


class LinearAttention(Resource[LinearAttentionStep]):
    """`backend`: the deployment's choice, None for the platform's."""

    def __init__(
        self,
        spec: LinearAttentionSpec,
        pool: RecurrentStatePool,
        *,
        backend: str | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.key = spec.key
        self.spec = spec
        self.pool = pool
        self.reads = (spec.state_key,)
        _check_blocks(spec, pool)
        need = LinearAttentionNeed(
            device.type,
            dtype,
            spec.num_key_heads,
            spec.num_value_heads,
            spec.key_dim,
            spec.value_dim,
            spec.conv_kernel,
        )
        self.backend = choose_backend(spec.key, need, backend)
        self._current = _Current()
        self._q_starts = spec.key + ".q_starts"

    def open(self, handle: int, config: OpenConfig) -> None:
        """Nothing of its own."""

    def close(self, handle: int) -> None:
        """Nothing of its own."""

    def plan(self, step: LinearAttentionStep, ctx: StepContext) -> LinearAttentionFacts:
        starts = ctx.staging[self._q_starts]
        num_rows, num_tokens = ctx.rows.handles.size, ctx.num_tokens
        starts[0] = 0
        np.cumsum(ctx.rows.spans, dtype=np.int32, out=starts[1 : num_rows + 1])
        # A padding row has one token, as far as there are padding tokens.
        num_padding = starts.size - num_rows - 1
        starts[num_rows + 1 :] = np.minimum(num_tokens + 1 + np.arange(num_padding), ctx.shape.tokens)
        return LinearAttentionFacts(ctx.shape.rows == ctx.shape.tokens if ctx.captured else ctx.single)

    def capturable(self, plan: LinearAttentionFacts, captured: LinearAttentionFacts) -> bool:
        return self.backend.capturable and plan == captured

    def layer(self, index: int) -> LayerLinearAttention:
        blocks = self.pool.layer(index).blocks
        states = LayerStates(blocks[CONV], blocks[DELTA])
        return LayerLinearAttention(self.backend, states, self.spec, self._current, begins=index == 0)

    def staging_fields(self) -> Sequence[StagingField]:
        return (StagingField(self._q_starts, "int32", "border"),)

    def begin_forward(self, plan: LinearAttentionFacts, staging: Mapping[str, Tensor]) -> None:
        key = self.pool.key
        self._current.meta = LinearAttentionMeta(
            staging[key + ".slots"], staging[key + ".has_state"], staging[self._q_starts], plan.single
        )


def _check_blocks(spec: LinearAttentionSpec, pool: RecurrentStatePool) -> None:
    """Raises `ValueError` unless the pool keeps what the rule goes on with."""
    if spec.num_value_heads % spec.num_key_heads:
        raise ValueError(
            f"linear attention {spec.key!r}: {spec.num_value_heads} value heads over {spec.num_key_heads} key heads; "
            "the first must be a multiple of the second"
        )
    channels = 2 * spec.num_key_heads * spec.key_dim + spec.num_value_heads * spec.value_dim
    expected = {
        StateBlock(CONV, (spec.conv_kernel - 1, channels)),
        StateBlock(DELTA, (spec.num_value_heads, spec.key_dim, spec.value_dim), wide=True),
    }
    if set(pool.spec.blocks) != expected:
        raise ValueError(
            f"linear attention {spec.key!r} needs the blocks {sorted(expected, key=lambda block: block.name)}; "
            f"{pool.key!r} has {list(pool.spec.blocks)}"
        )
