"""The consumer's end of one stream of one request: item ids, their walk tags, and what the next pass takes.

Pure integers, on the worker's loop thread. Reference counts are the caller's: an id is counted once from `put` until
`commit` or `clear` returns it. Windows overlap, so an item stays until no later window can contain it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from mstar.streaming.chunk_policy import ChunkPolicy, ChunkWindow


class _Taken(NamedTuple):
    """A taken chunk: the buffer's `cursor` and `start` before it, and the first item that is needed after it."""

    cursor: int
    start: int
    keep_from: int


class StreamBuffer:
    """Chunks are taken in order, given back newest first, and committed oldest first."""

    __slots__ = ("_base", "_cursor", "_cuts", "_ids", "_last_tag", "_pending", "_policy", "_start", "_tags", "_total")

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy = policy
        self._ids: list[int] = []
        self._tags: list[int] = []
        self._base = 0  # index of the first item still held
        self._cursor = 0  # first item that no chunk has taken as new
        self._start = 0  # first item of the run of equal tags that the cursor is in
        self._cuts: list[int] = []  # indices where the tag changes
        self._last_tag = -1
        self._total: int | None = None
        self._pending: list[_Taken] = []

    @property
    def num_received(self) -> int:
        return self._base + len(self._ids)

    @property
    def num_held(self) -> int:
        return len(self._ids)

    @property
    def exhausted(self) -> bool:
        """The end is known and every item has been taken."""
        return self._total is not None and self._cursor >= self._total

    @property
    def idle(self) -> bool:
        """No taken chunk awaits `commit` or `give_back`."""
        return not self._pending

    @property
    def next_tag(self) -> int | None:
        """Tag of the next new item, if it has arrived."""
        at = self._cursor - self._base
        return self._tags[at] if at < len(self._tags) else None

    def put(self, tensor_id: int, tag: int) -> None:
        """Take in the next item of the stream, of the walk `tag`.

        Raises:
            ValueError: the stream has ended before this item.
        """
        received = self.num_received
        if self._total is not None and received >= self._total:
            raise ValueError(f"item {received} of a stream that ended after {self._total}")
        if received and tag != self._last_tag:
            self._cuts.append(received)
        self._last_tag = tag
        self._ids.append(tensor_id)
        self._tags.append(tag)

    def end(self, total: int) -> None:
        """The stream has `total` items, arrived or not.

        Raises:
            ValueError: more items have arrived, or another total was given before.
        """
        if total < self.num_received or (self._total is not None and self._total != total):
            raise ValueError(f"a stream of {self.num_received} items (end: {self._total}) cannot end after {total}")
        self._total = total

    @property
    def has_chunk(self) -> bool:
        return self._window() is not None

    def take(self) -> list[int]:
        """Ids of the next chunk; only when `has_chunk`."""
        window = self._window()
        assert window is not None
        start = self._run_start()
        self._pending.append(_Taken(self._cursor, self._start, start + window.keep_from))
        self._start = start
        self._cursor = start + window.stop
        return self._ids[start + window.start - self._base : self._cursor - self._base]

    def take_nothing(self) -> list[int]:
        """An empty chunk, for a run of a node after the last item that concerns it."""
        self._pending.append(_Taken(self._cursor, self._start, -1))
        return []

    def give_back(self) -> None:
        """Undo the newest `take`."""
        self._cursor, self._start, _ = self._pending.pop()

    def commit(self) -> list[int]:
        """The pass of the oldest taken chunk is over. Returns the ids that no later window needs."""
        keep_from = self._pending.pop(0).keep_from
        return self._drop_before(keep_from) if keep_from > self._base else []

    def clear(self) -> list[int]:
        """Forget all items; returns the ids held."""
        self._pending.clear()
        self._cursor = self.num_received
        return self._drop_before(self._cursor)

    def _drop_before(self, index: int) -> list[int]:
        count = index - self._base
        gone = self._ids[:count]
        del self._ids[:count], self._tags[:count]
        self._base = index
        if not self._pending:  # a chunk given back may need them
            del self._cuts[: bisect_right(self._cuts, self._start)]
        return gone

    def _run_start(self) -> int:
        """Start of the run that the next new item is in."""
        at = bisect_right(self._cuts, self._cursor)
        return max(self._start, self._cuts[at - 1]) if at else self._start

    def _window(self) -> ChunkWindow | None:
        start = self._run_start()
        at = bisect_right(self._cuts, self._cursor)
        received = self.num_received
        more: bool | None
        if at < len(self._cuts):
            available, more = self._cuts[at] - start, False
        elif self._total is None:
            available, more = received - start, None
        else:
            available, more = received - start, received < self._total
        return self._policy.window(self._cursor - start, available, more)
