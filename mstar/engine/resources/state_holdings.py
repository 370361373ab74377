"""`StateHoldings`: the states that requests hold beside one cache, and where snapshots of them are made and found.

Loop thread, host integers; a part of `CacheHoldings`, which decides when. What slots contain changes only by forwards,
by the device operations queued here, in order, and by the copies that a step makes behind its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mstar.engine.device_ops import DeviceOp
from mstar.engine.resources.page_arena import PageArena
from mstar.engine.resources.row_keys import RowKeys
from mstar.engine.resources.state_slots import SINK_SLOT, StateSlots

FAR = np.iinfo(np.int32).max
"""No cut ahead."""
_ONE = np.ones(1, np.int32)


class Snapshot(NamedTuple):
    """A snapshot that a step makes: row `place` of the step, `slot` for the state behind its first `num_tokens`."""

    place: int
    handle: int
    num_tokens: int
    slot: int


class StateHoldings:
    """`key`: of the state pool. `live` int32 [handles]: each request's slot, the sink for none.

    A *cut* of a row is a length at which its chunks end, so that the state there can be kept: the last page boundary of
    the prompt (and the one before, where the prompt ends on it: its last token is always computed), multiples of
    `snapshot_interval` tokens (0: none), and its *junction*: where pages that others have computed end, when no
    snapshot is as deep as they are. A row makes one snapshot at a junction, so that rows which run side by side
    over one prompt do not make one with every chunk.
    """

    def __init__(
        self,
        key: str,
        slots: StateSlots,
        keys: RowKeys,
        host: PageArena | None,
        ops: list[DeviceOp],
        *,
        num_handles: int,
        page_size: int,
        snapshot_interval: int = 0,
    ) -> None:
        self.key = key
        self.slots = slots
        self.host = host
        self.live = np.zeros(num_handles, np.int32)
        self._keys = keys
        self._ops = ops
        self._page_size = page_size
        self._interval = -(-snapshot_interval // page_size) * page_size
        self._last = np.zeros(num_handles, np.int32)
        self._before_last = np.zeros(num_handles, np.int32)
        self._junction = np.zeros(num_handles, np.int32)
        self._pending: dict[int, list[Snapshot]] = {}
        self._latest_drawn: dict[int, bytes] = {}

    # a request comes and goes

    def introduce(self, handle: int, num_prompt: int) -> None:
        """Where its prompt is worth a cut; nowhere for one without keys."""
        if self._keys.has_keys(handle):
            self._last[handle] = num_prompt // self._page_size * self._page_size
            self._before_last[handle] = max(num_prompt - 1, 0) // self._page_size * self._page_size

    def covers(self, handle: int) -> bool:
        """Whether it has a slot, or can get one."""
        return bool(self.live[handle]) or self.slots.num_available > 0

    def take(self, handle: int, restores: bytes | None) -> None:
        """Give it a slot unless it has one, and order that its state is what the snapshot `restores` holds."""
        source = SINK_SLOT
        if restores is not None:
            source = self.slots.snapshots.find(restores) or SINK_SLOT
            assert source, "a snapshot that was matched is there"
            self.slots.snapshots.use(restores)
        if not self.live[handle]:
            self.live[handle] = self.slots.take_live(source)
        slot = int(self.live[handle])
        if source not in (SINK_SLOT, slot):
            self._ops.append(DeviceOp("restore", np.array([source], np.int32), np.array([slot], np.int32)))

    def release(self, handle: int) -> None:
        """It gives up its slot, and the snapshots of it that are not made yet. No step may hold the row."""
        for snapshot in self._pending.pop(handle, ()):
            self.slots.abandon(snapshot.slot)
        if self.live[handle]:
            self.slots.release(int(self.live[handle]))
            self.live[handle] = SINK_SLOT

    def close(self, handle: int) -> None:
        self.release(handle)
        for column in (self._last, self._before_last, self._junction):
            column[handle] = 0
        self._latest_drawn.pop(handle, None)

    # host memory of preempted requests

    def offload(self, handle: int) -> np.ndarray | None:
        """Order the copy of its state to the host; returns the slot there, int32 [1], None where there is no room."""
        if self.host is None:
            return None
        acquired = self.host.acquire(np.array([handle]), _ONE)
        if acquired.refused is not None:
            return None
        self._ops.append(DeviceOp("offload", self.live[[handle]], acquired.pages))
        return acquired.pages

    def reload(self, handle: int, host_slots: np.ndarray) -> None:
        """Order the copy back, into the slot that it has. The host's is free at once: whoever gets it writes later."""
        assert self.host is not None
        self._ops.append(DeviceOp("reload", host_slots, self.live[[handle]]))
        self.host.give_back(np.array([handle]), _ONE, host_slots)

    # what may be adopted

    def deepest(self, handle: int, num_before: int, num_pages: int) -> tuple[int, bytes | None]:
        """Of `num_pages` indexed pages behind the row's first `num_before`, how many end at a snapshot, and its key; 0
        and None where none does."""
        for count in range(num_pages, 0, -1):
            key = self._keys.key(handle, num_before + count)
            if key is not None and key in self.slots.snapshots:
                return count, key
        return 0, None

    def found(self, handle: int, length: int, num_tokens: int) -> None:
        """Pages of others go on to `num_tokens` of the row, whose state is known at `length` and no deeper."""
        reached = 0 < self._junction[handle] <= length
        if num_tokens > length and not reached:
            self._junction[handle] = num_tokens

    # cuts and snapshots

    def tokens_to_cut(self, handles: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int32 [rows]: tokens from `lengths` to the next cut, `FAR` where there is none."""
        nearest = np.full(handles.size, FAR, np.int32)
        for column in (self._before_last, self._last, self._junction):
            ahead = column[handles] - lengths
            nearest = np.where(ahead > 0, np.minimum(nearest, ahead), nearest)
        if self._interval:
            ahead = self._interval - lengths % self._interval
            nearest = np.where(lengths + ahead <= self._last[handles], np.minimum(nearest, ahead), nearest)
        return nearest

    def prepare(self, handles: np.ndarray, ends: np.ndarray, undo: Callable[[Callable[[], None]], None]) -> None:
        """A step takes its rows to `ends` int32 [rows]: slots for the snapshots that it makes, as far as there are
        any. `undo`: registers what gives them back."""
        for place in (ends % self._page_size == 0).nonzero()[0].tolist():
            handle, end = int(handles[place]), int(ends[place])
            if not self._is_wanted(handle, end):
                continue
            drawn = end > self._last[handle]
            slot = self.slots.take_snapshot(self._latest_drawn.get(handle) if drawn else None)
            if slot is None:
                return
            snapshot = Snapshot(place, handle, end, slot)
            self._pending.setdefault(handle, []).append(snapshot)
            undo(lambda snapshot=snapshot: self._give_up(snapshot))

    def prepared(self, handles: np.ndarray, ends: np.ndarray) -> list[Snapshot]:
        """What `prepare` has found slots for in a step of these rows."""
        if not self._pending:
            return []
        return [
            snapshot._replace(place=place)
            for place in (ends % self._page_size == 0).nonzero()[0].tolist()
            for snapshot in self._pending.get(int(handles[place]), ())
            if snapshot.num_tokens == ends[place]
        ]

    def publish(self, snapshot: Snapshot, *, keep: bool, page_is_indexed: Callable[[bytes], bool]) -> None:
        """The step that made it is routed. Without `keep`, or where nobody could find it, its slot is free again."""
        handle = snapshot.handle
        if not self._forget_pending(snapshot):
            return
        key = self._keys.key(handle, snapshot.num_tokens // self._page_size) if keep else None
        if key is None or key in self.slots.snapshots or not page_is_indexed(key):
            self.slots.abandon(snapshot.slot)
            return
        self.slots.publish(snapshot.slot, key)
        if snapshot.num_tokens > self._last[handle]:
            self._latest_drawn[handle] = key

    def check(self) -> None:
        """Conservation of slots, each live one a request's own."""
        self.slots.check()
        live = self.live[self.live != SINK_SLOT]
        if live.size != self.slots.num_live or np.unique(live).size != live.size:
            raise AssertionError(f"live slots by handle {live.tolist()}, {self.slots.num_live} counted")
        num_pending = sum(len(snapshots) for snapshots in self._pending.values())
        if num_pending != self.slots.num_snapshots - len(self.slots.snapshots):
            raise AssertionError(f"{num_pending} pending snapshots by handle")

    def _is_wanted(self, handle: int, end: int) -> bool:
        last = int(self._last[handle])
        if end > last:
            return self._keys.seals_drawn(handle)
        if end not in (last, self._before_last[handle], self._junction[handle]):
            if not self._interval or end % self._interval:
                return False
        key = self._keys.key(handle, end // self._page_size)
        return key is not None and key not in self.slots.snapshots

    def _give_up(self, snapshot: Snapshot) -> None:
        if self._forget_pending(snapshot):
            self.slots.abandon(snapshot.slot)

    def _forget_pending(self, snapshot: Snapshot) -> bool:
        """False: the row has given it up meanwhile."""
        pending = self._pending.get(snapshot.handle, [])
        for index, one in enumerate(pending):
            if one.slot == snapshot.slot:
                del pending[index]
                if not pending:
                    del self._pending[snapshot.handle]
                return True
        return False
