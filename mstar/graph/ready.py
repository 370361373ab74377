"""The ready index: for each (node, walk) the rows that may run, first come first served.

A row enters with a sequence number and keeps it: when it comes back (given back, or no longer gated) it stands where
it stood. Gated rows are not in here at all.
"""

from __future__ import annotations

from itertools import islice

from mstar.graph.program import CompiledGraph, NodeProgram
from mstar.graph.protocol import ReadyKey
from mstar.graph.rows import RowState


class ReadyQueue:
    """Rows of one key in order of their sequence numbers."""

    __slots__ = ("_in_order", "_last", "key", "rows")

    def __init__(self, key: ReadyKey) -> None:
        self.key = key
        self.rows: dict[int, int] = {}
        """handle → sequence number."""
        self._last = 0
        self._in_order = True

    def push(self, handle: int, sequence: int) -> None:
        if sequence > self._last or not self.rows:
            self._last = sequence
            self._in_order = self._in_order or not self.rows
        else:
            self._in_order = False
        self.rows[handle] = sequence

    def peek(self, limit: int) -> list[int]:
        """The first `limit` rows."""
        return list(islice(self._ordered(), limit))

    def oldest(self) -> int:
        """Sequence number of the first row; the queue is not empty."""
        return next(iter(self._ordered().values()))

    def _ordered(self) -> dict[int, int]:
        if not self._in_order:
            self.rows = dict(sorted(self.rows.items(), key=lambda item: item[1]))
            self._in_order = True
        return self.rows


class ReadyIndex:
    """The queues of one worker, and which rows are in them."""

    def __init__(self, graph: CompiledGraph, me: int) -> None:
        self.queues: dict[ReadyKey, ReadyQueue] = {key: ReadyQueue(key) for key in graph.keys_on(me)}
        self.by_walk: list[list[ReadyQueue]] = [
            [self.queues[node.key] for node in program.nodes] if program is not None else []
            for program in (graph.programs.get((walk, me)) for walk in graph.walk_names)
        ]
        self._clock = 0

    def add(self, row: RowState, node: NodeProgram) -> None:
        """The row has become ready for the node: last in line."""
        row.ready |= node.bit
        self._clock += 1
        row.sequences[node.index] = self._clock
        if not row.gates:
            self.by_walk[row.program.walk_index][node.index].push(row.handle, self._clock)

    def put_back(self, row: RowState, node: NodeProgram) -> None:
        """The row is ready again at its old place."""
        row.ready |= node.bit
        if not row.gates:
            self.by_walk[row.program.walk_index][node.index].push(row.handle, row.sequences[node.index])

    def remove(self, row: RowState, node: NodeProgram) -> None:
        row.ready &= ~node.bit
        self.by_walk[row.program.walk_index][node.index].rows.pop(row.handle, None)

    def regate(self, row: RowState) -> None:
        """The gates of the row or its request have changed: take it out of the queues, or back in."""
        before, row.gates = row.gates, row.request.gates | row.own_gates
        if row.ready and bool(before) != bool(row.gates):
            for node, queue in zip(row.program.nodes, self.by_walk[row.program.walk_index], strict=True):
                if row.ready & node.bit:
                    if row.gates:
                        del queue.rows[row.handle]
                    else:
                        queue.push(row.handle, row.sequences[node.index])

    def keys(self) -> list[ReadyKey]:
        """Keys with a row, the key of the oldest row first."""
        waiting = [queue for queue in self.queues.values() if queue.rows]
        if len(waiting) > 1:
            waiting.sort(key=ReadyQueue.oldest)
        return [queue.key for queue in waiting]
