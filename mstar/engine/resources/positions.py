"""`Positions`: where a step's tokens stand in their rows, and the rotary tables for those positions.

Positions continue the length of the cache `kv_key`. Control plane on the loop thread; the layer handle is read by
forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mstar.engine.resources.base import OpenConfig, Resource, StepContext
from mstar.engine.resources.cache_stream import token_positions
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.rotary_tables import rotary_tables
from mstar.engine.spec import RotarySpec
from mstar.engine.staging import StagingField
from mstar.engine.step import PositionStep


class RotaryState:
    """The layer handle, shared by all layers (see `mstar.engine.layer_handles.RotaryHandle`)."""

    __slots__ = ("axes", "cos", "positions", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self.axes: Tensor | None = None
        self.positions = torch.empty(0, dtype=torch.int32, device=cos.device)


class Positions(Resource[PositionStep]):
    """Rotary tables for `max_seq_len` positions."""

    def __init__(self, spec: RotarySpec, kv: PagedKV, *, max_seq_len: int, device: torch.device) -> None:
        self.key = spec.key
        self.spec = spec
        self.reads = (spec.kv_key,)
        self._kv = kv
        self._field = spec.key + ".positions"
        self.state = RotaryState(*rotary_tables(spec, max_seq_len, device))

    def open(self, handle: int, config: OpenConfig) -> None:
        """Nothing of its own: positions are the cache's lengths."""

    def close(self, handle: int) -> None:
        """Nothing of its own."""

    def plan(self, step: PositionStep, ctx: StepContext) -> None:
        lengths = self._kv.lengths[ctx.rows.handles]
        positions = lengths if ctx.single else token_positions(lengths, ctx.rows.spans)
        ctx.staging[self._field][: ctx.num_tokens] = positions

    def layer(self, index: int) -> RotaryState:
        return self.state

    def staging_fields(self) -> Sequence[StagingField]:
        return (StagingField(self._field, "int32", "token", 0),)

    def begin_forward(self, plan: None, staging: Mapping[str, Tensor]) -> None:
        self.state.positions = staging[self._field]
