"""What a runtime knows per (node, walk) that it runs, and the columns it hands to a step."""

from __future__ import annotations

from mstar.graph.program import ROOT, CompiledGraph, InputProgram, LoopProgram, NodeProgram, WalkProgram
from mstar.graph.protocol import LIVE_COLUMN, GraphError, ReadyKey, TakenRows
from mstar.graph.ready import ReadyIndex, ReadyQueue
from mstar.graph.references import Value
from mstar.graph.rows import RowState
from mstar.graph.stream_desk import StreamDesk


class KeyEntry:
    """One node of one walk. `live`: its loop-backs to itself were live values in its last completion."""

    __slots__ = ("key", "live", "loop", "node", "program", "queue", "rows", "short", "sole", "speculates")

    def __init__(
        self, node: NodeProgram, program: WalkProgram, rows: dict[int, RowState], queue: ReadyQueue, allowed: bool
    ) -> None:
        self.key = node.key
        self.node = node
        self.program = program
        self.rows = rows
        self.queue = queue
        self.loop: LoopProgram | None = program.loops[node.scope] if node.scope != ROOT else None
        self.sole = self.loop is not None and self.loop.members == node.bit
        self.short = _short_position(node, self.loop)
        self.speculates = node.speculates and allowed
        self.live = not node.self_signals


class KeyTable:
    """All keys of one worker."""

    def __init__(
        self,
        graph: CompiledGraph,
        me: int,
        disabled: frozenset[tuple[str, str]],
        rows: list[dict[int, RowState]],
        ready: ReadyIndex,
        desk: StreamDesk,
    ) -> None:
        index = {partition.name: partition.index for partition in graph.partitions}
        self._desk = desk
        self._entries = {
            node.key: KeyEntry(
                node, program, rows[index[program.partition]], ready.queues[node.key], node.key not in disabled
            )
            for (_, rank), program in graph.programs.items()
            if rank == me
            for node in program.nodes
        }
        if unknown := sorted(set(disabled) - set(graph.keys_everywhere())):
            raise GraphError(f"disable_spec_node_walks names {unknown}, which no walk has")

    def entry(self, key: ReadyKey) -> KeyEntry:
        """Raises:
        GraphError: this worker has no such node in that walk.
        """
        found = self._entries.get(key)
        if found is None:
            raise GraphError(
                f"this worker does not run {key.node!r} in walk {key.walk!r}; it runs {sorted(self._entries)}"
            )
        return found

    def taken(self, entry: KeyEntry, handles: list[int], rows: list[RowState], following: bool) -> TakenRows:
        """Input columns of rows; takes their stream chunks. `following`: for the iteration after the running one."""
        node = entry.node
        ids: dict[str, list[int]] = {}
        lists: dict[str, list[list[int]]] = {}
        for source in node.inputs:
            if following and source.name in node.self_inputs:
                ids[source.name] = [LIVE_COLUMN] * len(rows)
            elif source.many:
                lists[source.name] = [_list(_read(row, source, following)) for row in rows]
            else:
                ids[source.name] = [_one(_read(row, source, following)) for row in rows]
        finals = [False] * len(rows)
        if node.streams:
            chunks = [self._desk.take(row, node) for row in rows]
            finals = [final for _, final in chunks]
            for i, stream in enumerate(node.streams):
                lists[stream.name] = [taken[i] for taken, _ in chunks]
        scope = node.scope
        if scope != ROOT:
            iterations = [row.iterations[scope] + following for row in rows]
        else:
            iterations = [max(row.passes, 0) for row in rows]
        return TakenRows(entry.key, handles, ids, lists, iterations, finals)


def _read(row: RowState, source: InputProgram, following: bool) -> Value:
    """The value that counts: of the innermost register that holds one."""
    if following and source.coming >= 0:
        return row.ids[source.coming]
    for position in source.positions:
        if row.filled >> position & 1:
            return row.ids[position]
    raise GraphError(f"input {source.name!r} of row {row.handle} is empty")


def _list(value: Value) -> list[int]:
    assert isinstance(value, list)  # positions that hold lists are filled with lists only
    return value


def _one(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _short_position(node: NodeProgram, loop: LoopProgram | None) -> int:
    """The one position that a completion renews, if it renews nothing else and notes nothing; -1 otherwise."""
    if loop is None or loop.members != node.bit or node.streams or len(loop.promotes) != 1:
        return -1
    source, target = loop.promotes[0]
    moved = [position for route in node.routes for position in route.following]
    if moved != [source] or node.used != (target,) or any(route.caches for route in node.routes):
        return -1
    return target
