"""`StateSlots`: the only way to get a state slot. A slot is free, live (a request's own state) or a snapshot.

Loop thread, host integers. Snapshots count as room: a slot is taken from the one used longest ago when none is free, so
they never keep a request from its slot. A snapshot is *pending* from the time its slot is taken until the step that
makes it has been published; until then nobody finds it and nobody takes its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np

from mstar.engine.resources.snapshot_index import SnapshotIndex

SINK_SLOT = 0
"""Nobody owns it: padding rows that must write somewhere write there."""


class SlotUse(IntEnum):
    FREE = 0
    LIVE = 1
    PENDING = 2
    SNAPSHOT = 3


class StateSlots:
    """`num_slots` counts the sink. `on_free` is told of a slot whose contents nobody may read any more."""

    def __init__(self, num_slots: int, on_free: Callable[[int], None] | None = None) -> None:
        if num_slots < 2:
            raise ValueError(f"a state pool needs the sink slot and at least one more, not {num_slots} slots")
        self.num_slots = num_slots
        self.snapshots = SnapshotIndex()
        self.num_evicted = 0
        self._uses = np.zeros(num_slots, np.int8)
        self._free = list(range(num_slots - 1, 0, -1))
        self._num_pending = 0
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        """Pending ones included."""
        return len(self.snapshots) + self._num_pending

    @property
    def num_live(self) -> int:
        return self.num_slots - 1 - len(self._free) - self.num_snapshots

    @property
    def num_available(self) -> int:
        """Slots that `take_live` can find."""
        return len(self._free) + len(self.snapshots)

    def take_live(self, restores: int = SINK_SLOT) -> int:
        """A slot for a request, which begins with what is in the snapshot `restores`, if there is one: that is evicted
        after all others, and then it is the slot itself. Raises `KeyError` when nothing is available."""
        slot = self._take(restores)
        self._uses[slot] = SlotUse.LIVE
        return slot

    def release(self, slot: int) -> None:
        """A request gives up its slot."""
        self._expect(slot, SlotUse.LIVE)
        self._put_back(slot)

    def take_snapshot(self, replaces: bytes | None = None) -> int | None:
        """A slot for a snapshot to come; None: there is none but those of requests. When none is free, the snapshot
        `replaces` gives way before the one used longest ago."""
        if not self.num_available:
            return None
        if not self._free and replaces is not None:
            self.drop(replaces)
        slot = self._take()
        self._uses[slot] = SlotUse.PENDING
        self._num_pending += 1
        return slot

    def abandon(self, slot: int) -> None:
        """A pending snapshot comes to nothing."""
        self._expect(slot, SlotUse.PENDING)
        self._num_pending -= 1
        self._put_back(slot)

    def publish(self, slot: int, key: bytes) -> None:
        """A pending snapshot has been made: others may find it."""
        self._expect(slot, SlotUse.PENDING)
        self.snapshots.put(key, slot)
        self._num_pending -= 1
        self._uses[slot] = SlotUse.SNAPSHOT

    def drop(self, key: bytes) -> None:
        """The page that the key names has gone, and with it the use of a snapshot behind it, if there is one."""
        slot = self.snapshots.drop(key)
        if slot is not None:
            self.num_evicted += 1
            self._put_back(slot)

    def check(self) -> None:
        """Conservation: free + live + snapshots is the pool, each slot in one use."""
        uses = self._uses[1:]
        free = {int(slot) + 1 for slot in np.flatnonzero(uses == SlotUse.FREE)}
        kept = {int(slot) + 1 for slot in np.flatnonzero(uses == SlotUse.SNAPSHOT)}
        if set(self._free) != free or len(free) != len(self._free) or self._uses[SINK_SLOT] != SlotUse.FREE:
            raise AssertionError(f"free slots {sorted(self._free)}, without a use {sorted(free)}")
        if {slot for _, slot in self.snapshots} != kept or len(kept) != len(self.snapshots):
            raise AssertionError(f"snapshots {list(self.snapshots)} in slots {sorted(kept)}")
        if int((uses == SlotUse.PENDING).sum()) != self._num_pending:
            raise AssertionError(f"{self._num_pending} pending snapshots counted, {uses.tolist()}")
        if self.num_free + self.num_live + self.num_snapshots != self.num_slots - 1:
            raise AssertionError("state slots are neither free, live nor snapshots")

    def _take(self, restores: int = SINK_SLOT) -> int:
        if self._free:
            return self._free.pop()
        slot = self.snapshots.evict()
        self.num_evicted += 1
        if self._on_free is not None and slot != restores:
            self._on_free(slot)
        return slot

    def _put_back(self, slot: int) -> None:
        self._uses[slot] = SlotUse.FREE
        self._free.append(slot)
        if self._on_free is not None:
            self._on_free(slot)

    def _expect(self, slot: int, use: SlotUse) -> None:
        if self._uses[slot] != use:
            raise ValueError(f"state slot {slot} is {SlotUse(self._uses[slot]).name.lower()}, not {use.name.lower()}")
