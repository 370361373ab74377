"""`Positions`: where a step's tokens stand in their rows, and the rotary tables for those positions.

Positions continue the length of the cache `kv_key`, which stages them for its own slots; with sections
(`RotarySpec.sections`) a token has three, which are planned here on the loop thread. The layer handle is read by
forwards, on the executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mstar.engine.resources.base import OpenConfig, Resource, StepContext
from mstar.engine.resources.media_positions import MediaPositions
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.rotary_tables import frequency_axes, rotary_tables
from mstar.engine.spec import RotarySpec
from mstar.engine.staging import StagingField, StepShape
from mstar.engine.step import PositionStep


class RotaryState:
    """The layer handle, shared by all layers (see `mstar.engine.layer_handles.RotaryHandle`)."""

    __slots__ = ("axes", "cos", "positions", "sin")

    def __init__(self, cos: Tensor, sin: Tensor, axes: Tensor | None) -> None:
        self.cos = cos
        self.sin = sin
        self.axes = axes
        self.positions = torch.empty(0 if axes is None else (0, 3), dtype=torch.int32, device=cos.device)


class Positions(Resource[PositionStep]):
    """Rotary tables for `max_seq_len` positions: no token's position is beyond its index."""

    def __init__(self, spec: RotarySpec, kv: PagedKV, *, max_seq_len: int, device: torch.device) -> None:
        self.key = spec.key
        self.spec = spec
        self.reads = (spec.kv_key,)
        self._kv = kv
        self._media = None if spec.sections is None else MediaPositions(kv.lengths.size)
        self._field = (kv.key if self._media is None else spec.key) + ".positions"
        self.state = RotaryState(*rotary_tables(spec, max_seq_len, device), frequency_axes(spec, device))

    def introduce(self, handle: int, config: OpenConfig) -> None:
        if self._media is not None:
            self._media.introduce(handle, config.prompt_ids, config.media)

    def open(self, handle: int, config: OpenConfig) -> None:
        """What it keeps of a request is its prompt's, and known by then."""

    def close(self, handle: int) -> None:
        if self._media is not None:
            self._media.close(handle)

    def plan(self, step: PositionStep, ctx: StepContext) -> None:
        if self._media is None:
            return
        handles, spans, _ = ctx.rows
        out = ctx.staging[self._field][: ctx.num_tokens]
        self._media.write(out, handles, self._kv.lengths[handles], None if ctx.single else spans)

    def layer(self, index: int) -> RotaryState:
        return self.state

    def staging_fields(self) -> Sequence[StagingField]:
        return () if self._media is None else (StagingField(self._field, "int32", "token", 0, _three),)

    def begin_forward(self, plan: None, staging: Mapping[str, Tensor]) -> None:
        self.state.positions = staging[self._field]


def _three(shape: StepShape) -> int:
    return 3
