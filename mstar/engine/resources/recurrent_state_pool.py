"""`RecurrentStatePool`: states of fixed size of a node's requests, and snapshots of them at page boundaries.

Control plane (loop thread): which slot a step's rows go on in, and which snapshots it makes; what requests hold between
steps is `states`, part of the holdings of the cache that the states go with. Data plane (executor): the blocks, the
device operations ordered for them, and the copies behind a forward. It computes no state: who reads `<key>.slots` and
`<key>.has_state` does, or a layer by `LayerState`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.engine.device_ops import NO_PAGES, DeviceOp
from mstar.engine.execution import AdmitOutcome
from mstar.engine.resources.base import OpenConfig, Resource, StepContext, Transaction, Work
from mstar.engine.resources.host_pool import HostPool
from mstar.engine.resources.page_arena import PageArena
from mstar.engine.resources.page_tensors import zeros
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.state_holdings import Snapshot, StateHoldings
from mstar.engine.resources.state_slots import SINK_SLOT, StateSlots
from mstar.engine.spec import RecurrentStateSpec, StateBlock
from mstar.engine.staging import StagingField
from mstar.engine.step import RecurrentStep, Rows


class StateFacts(NamedTuple):
    """Of one step: the rows' lengths after it, int32 [rows], and the snapshots that it makes: of slots `sources`, int32
    [snapshots]."""

    ends: np.ndarray
    snapshots: Sequence[Snapshot]
    sources: np.ndarray


class _Current:
    """What the layer handles of one pool share: the running step."""

    __slots__ = ("has_state", "slots")

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.has_state: Tensor | None = None


class LayerState:
    """One layer's states. `blocks`: by name, `[slots, *shape]`."""

    __slots__ = ("_current", "blocks")

    def __init__(self, blocks: Mapping[str, Tensor], current: _Current) -> None:
        self.blocks = blocks
        self._current = current

    @property
    def slots(self) -> Tensor:
        """int32 [rows] of the running step; -1 for padding rows, which have none."""
        assert self._current.slots is not None, "states outside a step"
        return self._current.slots

    @property
    def has_state(self) -> Tensor:
        """int32 [rows]: 0 for rows that begin: whatever their slot holds is not theirs."""
        assert self._current.has_state is not None, "states outside a step"
        return self._current.has_state

    def gather(self, name: str) -> Tensor:
        """`[rows, *shape]`: a copy of the rows' states, zero for rows that begin."""
        states = self.blocks[name].index_select(0, self.slots.clamp(min=SINK_SLOT))
        begins = self.has_state == 0
        return states.masked_fill_(begins.view(-1, *[1] * (states.dim() - 1)), 0)

    def scatter_(self, name: str, states: Tensor) -> None:
        """The rows go on with `states [rows, *shape]`."""
        self.blocks[name].index_copy_(0, self.slots.clamp(min=SINK_SLOT).long(), states)


class StateDtypes(NamedTuple):
    """Of blocks: `narrow` is that of caches; `wide` of blocks that ask for more."""

    narrow: torch.dtype
    wide: torch.dtype = torch.float32

    def of(self, block: StateBlock) -> torch.dtype:
        return self.wide if block.wide else self.narrow


def slot_bytes(spec: RecurrentStateSpec, dtypes: StateDtypes) -> int:
    """Bytes of one slot over all layers and blocks."""
    return spec.num_layers * sum(math.prod(b.shape) * dtypes.of(b).itemsize for b in spec.blocks)


class RecurrentStatePool(Resource[RecurrentStep]):
    """`num_slots` includes the sink's. `num_host_slots`: room on the host for states of preempted rows."""

    repeatable = False

    def __init__(
        self,
        spec: RecurrentStateSpec,
        cache: PagedKV,
        *,
        num_slots: int,
        dtypes: StateDtypes,
        device: torch.device,
        poison: bool = False,
        num_host_slots: int = 0,
        snapshot_interval: int = 0,
    ) -> None:
        self.key = spec.key
        self.spec = spec
        self.dtypes = dtypes
        self.cache = cache
        self.reads = (cache.key,)
        num_handles = cache.lengths.size
        self._poison = poison
        self._ops: list[DeviceOp] = []
        self._blocks = {b.name: _pool(spec, b, num_slots, dtypes, device) for b in spec.blocks}
        self._host = {name: HostPool(num_host_slots, b) for name, b in self._blocks.items() if num_host_slots}
        self.states = StateHoldings(
            spec.key,
            StateSlots(num_slots, self._poison_slot if poison else None),
            cache.holdings.keys,
            PageArena(num_host_slots + 1, num_handles) if num_host_slots else None,
            self._ops,
            num_handles=num_handles,
            page_size=cache.spec.page_size,
            snapshot_interval=snapshot_interval,
        )
        cache.holdings.attach(self.states)
        self._current = _Current()
        if poison:
            self._fill_nan(range(num_slots))

    def open(self, handle: int, config: OpenConfig) -> None:
        """What a row holds it has from the cache's `reserve` on."""

    def close(self, handle: int) -> None:
        """The cache's holdings give up both."""

    def admit(self, step: RecurrentStep, ctx: StepContext, txn: Transaction) -> AdmitOutcome:
        handles, spans, _ = ctx.rows
        self.states.prepare(handles, self.cache.lengths[handles] + spans, txn.undo)
        return AdmitOutcome()

    def plan(self, step: RecurrentStep, ctx: StepContext) -> StateFacts:
        handles, spans, _ = ctx.rows
        lengths = self.cache.lengths[handles]
        ctx.staging[self.key + ".slots"][: handles.size] = self.states.live[handles]
        ctx.staging[self.key + ".has_state"][: handles.size] = lengths > 0
        ends = lengths + spans
        snapshots = self.states.prepared(handles, ends)
        if not snapshots:
            return StateFacts(ends, (), NO_PAGES)
        return StateFacts(ends, snapshots, self.states.live[[snapshot.handle for snapshot in snapshots]])

    def publish(self, step: RecurrentStep, rows: Rows, plan: StateFacts, keep: np.ndarray | None) -> None:
        indexed = self.cache.arena.index.__contains__
        for snapshot in plan.snapshots:
            kept = keep is None or bool(keep[snapshot.place])
            self.states.publish(snapshot, keep=kept, page_is_indexed=indexed)

    def layer(self, index: int) -> LayerState:
        if not 0 <= index < self.spec.num_layers:
            raise LookupError(f"resource {self.key!r} has {self.spec.num_layers} layers, layer {index} was asked")
        return LayerState({name: block[index] for name, block in self._blocks.items()}, self._current)

    def staging_fields(self) -> Sequence[StagingField]:
        return (
            StagingField(self.key + ".slots", "int32", "row", -1),
            StagingField(self.key + ".has_state", "int32", "row", 0),
        )

    def drain_work(self) -> Sequence[Work]:
        if not self._ops:
            return ()
        work = [partial(self._carry_out, op) for op in self._ops]
        self._ops.clear()
        return work

    def begin_forward(self, plan: StateFacts, staging: Mapping[str, Tensor]) -> None:
        self._current.slots = staging[self.key + ".slots"]
        self._current.has_state = staging[self.key + ".has_state"]
        if self._poison:  # what padding rows wrote must reach nobody
            self._fill_nan([SINK_SLOT])

    def after_forward(self, plan: StateFacts) -> None:
        if plan.snapshots:
            targets = [snapshot.slot for snapshot in plan.snapshots]
            self._copy(plan.sources.tolist(), targets)

    def gauges(self) -> Mapping[str, float]:
        slots = self.states.slots
        counts = {"free": slots.num_free, "live": slots.num_live, "snapshot": slots.num_snapshots}
        gauges = {f'mstar_slots{{pool="{self.key}",state="{state}"}}': float(count) for state, count in counts.items()}
        if (host := self.states.host) is not None:
            for state, count in (("free", host.num_free), ("live", host.num_owned)):
                gauges[f'mstar_slots{{pool="{self.key}.host",state="{state}"}}'] = float(count)
        return gauges

    def _carry_out(self, op: DeviceOp) -> None:
        match op.kind:
            case "poison":
                self._fill_nan(op.dst.tolist())
            case "restore":
                self._copy(op.src.tolist(), op.dst.tolist())
            case "offload":
                for name, host in self._host.items():
                    host.store(self._blocks[name], op.src, op.dst)
            case "reload":
                for name, host in self._host.items():
                    host.load(self._blocks[name], op.src, op.dst)

    def _copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Slots `src` to slots `dst`, all blocks and layers."""
        for block in self._blocks.values():
            for begin, end in zip(src, dst, strict=True):
                block[:, end].copy_(block[:, begin])

    def _poison_slot(self, slot: int) -> None:
        self._ops.append(DeviceOp("poison", NO_PAGES, np.array([slot], np.int32)))

    def _fill_nan(self, slots: Sequence[int]) -> None:
        for block in self._blocks.values():
            for slot in slots:
                block[:, slot].fill_(float("nan"))


def _pool(
    spec: RecurrentStateSpec, block: StateBlock, num_slots: int, dtypes: StateDtypes, device: torch.device
) -> Tensor:
    """`[layers, slots, *shape]`"""
    return zeros((spec.num_layers, num_slots, *block.shape), dtypes.of(block), device)
