"""Request ids and their handles in one worker process, and side tables that cannot outlive a request.

Owned by the worker's loop thread. A handle is a small integer that indexes columns; it means nothing in another
process and is given to the next request once released, so nothing keyed by it may survive: tables made by
`RidTable.handle_map` are purged by `release` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TableFull(Exception):
    """All handles are taken: the caller must hold the request until one is released."""


class UnknownHandle(LookupError):
    """A handle that names no request now. Handles only come from local state, so this is a bug of the caller."""


class HandleMap(Generic[T]):
    """One value per live handle. Made by `RidTable.handle_map`; entries go when their handle is released."""

    __slots__ = ("_dispose", "_name", "_table", "_values")

    def __init__(self, table: RidTable, name: str, dispose: Callable[[T], object] | None) -> None:
        self._table = table
        self._name = name
        self._dispose = dispose
        self._values: dict[int, T] = {}

    def __getitem__(self, handle: int) -> T:
        try:
            return self._values[handle]
        except KeyError:
            raise UnknownHandle(f"{self._name}: nothing for handle {handle} ({self._table.describe(handle)})") from None

    def __setitem__(self, handle: int, value: T) -> None:
        self._table.rid(handle)
        self._values[handle] = value

    def __contains__(self, handle: int) -> bool:
        return handle in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def get(self, handle: int) -> T | None:
        return self._values.get(handle)

    def pop(self, handle: int) -> T | None:
        """Takes the value out; None where there is none."""
        return self._values.pop(handle, None)

    def purge(self, handle: int) -> None:
        """The handle is released: its value is disposed of."""
        value = self._values.pop(handle, None)
        if value is not None and self._dispose is not None:
            self._dispose(value)

    def items(self) -> Iterator[tuple[int, T]]:
        return iter(self._values.items())

    def values(self) -> Iterator[T]:
        return iter(self._values.values())


class RidTable:
    """Request id (a string, on the wire) ↔ handle (an int in `[first, first + capacity)`, in this process).

    The handle released last is given out first, so that columns stay warm. `first` leaves room below for handles that
    name no request, such as the row that pads a batch.
    """

    __slots__ = ("_free", "_handles", "_maps", "_rids", "capacity")

    def __init__(self, capacity: int, first: int = 0) -> None:
        if capacity < 1 or first < 0:
            raise ValueError(f"capacity {capacity} and first {first}: expected at least 1 and at least 0")
        self.capacity = capacity
        self._rids: dict[int, str] = {}
        self._free = list(range(first + capacity - 1, first - 1, -1))
        self._handles: dict[str, int] = {}
        self._maps: list[HandleMap] = []

    def __len__(self) -> int:
        """Number of live handles."""
        return len(self._handles)

    def handle_map(self, name: str, dispose: Callable[[Any], object] | None = None) -> HandleMap:
        """A side table that `release` purges; `name` is for messages. `dispose` is given what is purged (not what is
        popped or overwritten). Annotate what it holds: `m: HandleMap[Row]`."""
        made: HandleMap = HandleMap(self, name, dispose)
        self._maps.append(made)
        return made

    def intern(self, rid: str) -> int:
        """The handle of `rid`, a new one unless it has one.

        Raises:
            TableFull: `capacity` requests are live.
        """
        handle = self._handles.get(rid)
        if handle is None:
            if not self._free:
                raise TableFull(f"{self.capacity} requests are live; no handle for {rid!r}")
            handle = self._free.pop()
            self._handles[rid] = handle
            self._rids[handle] = rid
        return handle

    def handle(self, rid: str) -> int | None:
        """For ids off the wire: None where the request is not, or no longer, known here."""
        return self._handles.get(rid)

    def handles(self, rids: Sequence[str]) -> list[int | None]:
        """`handle` of each."""
        return list(map(self._handles.get, rids))

    def is_live(self, handle: int) -> bool:
        return handle in self._rids

    def rid(self, handle: int) -> str:
        """
        Raises:
            UnknownHandle: the handle is not live.
        """
        rid = self._rids.get(handle)
        if rid is None:
            raise UnknownHandle(f"handle {handle} names no request ({len(self)} of {self.capacity} are live)")
        return rid

    def rids(self, handles: Sequence[int]) -> list[str]:
        """`rid` of each, for a whole batch at once.

        Raises:
            UnknownHandle: one of them is not live.
        """
        try:
            return list(map(self._rids.__getitem__, handles))
        except KeyError:
            return [self.rid(handle) for handle in handles]  # raises for the first bad one

    def release(self, handle: int) -> str:
        """Forgets the request and everything that any handle map holds for it; returns its id.

        Raises:
            UnknownHandle: the handle is not live.
        """
        rid = self.rid(handle)
        for purged in self._maps:
            purged.purge(handle)
        del self._handles[rid]
        del self._rids[handle]
        self._free.append(handle)
        return rid

    def describe(self, handle: int) -> str:
        """For messages: the request behind a handle, live or not."""
        return f"request {self._rids[handle]}" if self.is_live(handle) else "no live request"
