"""`SnapshotIndex`: which state slot holds the state behind the page that a key names, the one used longest ago first.

Loop thread, host only. It owns no slot by itself: `StateSlots` keeps the accounts, and is the only one that calls here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class SnapshotIndex:
    """A snapshot is found by the key of the last page before it: equal keys, equal states."""

    def __init__(self) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Keys with their slots, the one used longest ago first."""
        return iter(self._slots.items())

    def find(self, key: bytes) -> int | None:
        return self._slots.get(key)

    def use(self, key: bytes) -> None:
        """It is evicted after all others from now on."""
        self._slots.move_to_end(key)

    def put(self, key: bytes, slot: int) -> None:
        if key in self._slots:
            raise ValueError(f"there is a snapshot in slot {self._slots[key]} already")
        self._slots[key] = slot

    def drop(self, key: bytes) -> int | None:
        """Forget the snapshot; returns its slot, None where there is none."""
        return self._slots.pop(key, None)

    def evict(self) -> int:
        """Forget the snapshot used longest ago. Raises `KeyError` when there is none."""
        return self._slots.popitem(last=False)[1]
