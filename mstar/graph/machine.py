"""How a row moves through its walk: values fill inputs, nodes become ready, loops advance and end, walks end.

On the worker's loop thread. Everything is one row at a time; `mstar.graph.runtime` covers whole batches. Effects on
the world outside go to the `Outflow`, reference counts to `References`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mstar.graph.outflow import Outflow
from mstar.graph.program import ROOT, LoopProgram, NodeProgram, PartitionProgram, PersistOp, Route, WalkProgram
from mstar.graph.protocol import LIVE_COLUMN, NO_TENSOR, GraphError
from mstar.graph.ready import ReadyIndex
from mstar.graph.references import References, Value
from mstar.graph.rows import RequestState, RowState
from mstar.graph.stream_desk import StreamDesk

_SPENT = -2
"""In place of a persisted live value that cannot be read any more."""


class RowMachine:
    """`walk_over` is called when a row's walk has ended here; `wake` when a stream's consumer here got an item."""

    def __init__(
        self,
        refs: References,
        outflow: Outflow,
        ready: ReadyIndex,
        desk: StreamDesk,
        walk_over: Callable[[RowState], None],
        wake: Callable[[RequestState, int], None],
    ) -> None:
        self._refs = refs
        self._outflow = outflow
        self._ready = ready
        self._desk = desk
        self._walk_over = walk_over
        self._wake = wake

    def enter(self, row: RowState, program: WalkProgram) -> None:
        """Start a walk. It may be over at once: ask `is_over`.

        Raises:
            GraphError: an input is bound to a live value that its node has overwritten since; nothing has changed.
        """
        persisted = row.request.persisted.get(row.partition.index, {})
        for _, name, _ in program.externals:
            if persisted.get(name) == _SPENT:
                raise GraphError(
                    f"walk {program.walk!r} takes {name!r}, a live value whose node has run since; persist a tensor"
                )
        row.program = program
        row.active = True
        row.done = row.ready = row.running = row.stopping = row.arrived = row.filled = 0
        row.ids = [NO_TENSOR] * program.num_positions
        row.caches = [[] if many else NO_TENSOR for many in program.caches]
        row.iterations = [0] * len(program.loops)
        row.sequences = [0] * len(program.nodes)
        self.resolve_limits(row)
        for position, name, optional in program.externals:
            if name in persisted:
                self._set(row, position, persisted[name])
            elif optional:
                self._set(row, position, NO_TENSOR)
        if LIVE_COLUMN in persisted.values():
            self._spend_live(persisted, program)
        self._skip_loops(row, program.root_loops)
        waiting, row.parked = row.parked, []
        for slot, ids in waiting:
            self.arrive(row, slot, ids, parked=True)
        for node in program.nodes:
            self.try_ready(row, node)

    @staticmethod
    def _spend_live(persisted: dict[str, Value], program: WalkProgram) -> None:
        """A persisted live value serves one walk: the node that made it, and alone takes it, writes its column anew."""
        names = {name for node in program.nodes for name in node.live_externals}
        for name in names.intersection(persisted):
            if persisted[name] == LIVE_COLUMN:
                persisted[name] = _SPENT

    def is_over(self, row: RowState) -> bool:
        program = row.program
        return (
            row.done & program.root_members == program.root_members
            and row.arrived == program.all_arrivals
            and row.active
        )

    def resolve_limits(self, row: RowState) -> None:
        """A loop whose body could never run anything counts as a loop with limit 0."""
        loops = row.program.loops
        limits = [0] * len(loops)
        for loop in reversed(loops):
            limit = row.named_limits[loop.limit] if loop.max_iters < 0 else loop.max_iters
            if loop.has_direct_node or any(limits[child] for child in loop.children):
                limits[loop.index] = limit
        row.limits = limits

    def arrive(self, row: RowState, slot: int, ids: list[int], parked: bool = False) -> None:
        """A value from another worker: for this walk if it is the first of its slot, else for a later one."""
        arrival = row.program.arrivals.get(slot) if row.active else None
        if arrival is None or row.arrived & arrival.bit:
            if not parked:
                self._refs.retain(ids)
            row.parked.append((slot, ids))
            return
        row.arrived |= arrival.bit
        if parked:
            self._refs.release(ids)
        else:
            self._refs.pass_through(ids)
        if arrival.position >= 0:
            many = row.program.many[arrival.position]
            self._fill(row, arrival.position, [one for one in ids if one != NO_TENSOR] if many else ids[0])
        elif arrival.signal:
            value = ids[0] if len(ids) == 1 else ids
            self.keep(row.request, row.partition, arrival.signal, value)

    def keep(self, request: RequestState, partition: PartitionProgram, signal: str, value: Value) -> None:
        """Bind a persisted signal, for walks entered from now on. An absent value changes nothing."""
        if value == NO_TENSOR:
            return
        if isinstance(value, int) and signal in partition.list_signals:
            value = [value]
        self._refs.retain(value)
        kept = request.persisted.setdefault(partition.index, {})
        if signal in kept:
            self._refs.release(kept[signal])
        kept[signal] = value

    def bind_late(self, row: RowState, signal: str) -> None:
        """Give a newly bound signal to inputs of the current walk whose node has not run."""
        program = row.program
        for position, name, optional in program.externals:
            node = program.nodes[program.readers[position]]
            if name != signal or (row.done | row.running | row.armed) & node.bit or self._has_iterated(row, node.scope):
                continue
            absent = row.ids[position] in (NO_TENSOR, [])
            if not row.filled >> position & 1 or (optional and absent):
                self._fill(row, position, row.request.persisted[row.partition.index][signal])

    def finish(self, row: RowState, node: NodeProgram, values: Sequence[int]) -> None:
        """The node has completed: `values[i]` is its output `node.routes[i]`. Columns to other workers, to the client,
        to streams and to persisted signals are the caller's."""
        row.done |= node.bit
        for position in node.used:
            self._drop(row, position)
        if node.streams:
            self._desk.commit(row, node)
        for route, value in zip(node.routes, values, strict=True):
            self._route_inside(row, route, value)
        self._progress(row, node.scope)

    def try_ready(self, row: RowState, node: NodeProgram) -> None:
        if row.filled & node.need != node.need or (row.done | row.running | row.ready | row.armed) & node.bit:
            return
        if node.streams and not self._desk.chunks_ready(row, node):
            return
        self._ready.add(row, node)

    def persist(self, row: RowState, op: PersistOp, value: Value) -> None:
        if op.local:
            self.keep(row.request, row.partition, op.signal, value)
        open_on = row.request.open_on
        for peer, slot in op.remotes:
            if open_on is None or peer in open_on:
                self._outflow.edge(peer, slot, row.handle, value)

    def empty_inputs(self, row: RowState) -> None:
        """Release what the row's walk holds."""
        for position in range(row.program.num_positions):
            self._drop(row, position)
        for value in row.caches:
            self._refs.release(value)
        row.caches = []

    def empty(self, row: RowState) -> None:
        """Release everything that the row holds."""
        self.empty_inputs(row)
        for _, ids in row.parked:
            self._refs.release(ids)
        row.parked = []

    def cut_short(self, row: RowState, loop: LoopProgram) -> None:
        """End a loop that has not started."""
        for index in loop.nodes:
            node = row.program.nodes[index]
            if row.ready & node.bit:
                self._ready.remove(row, node)
        self._end_loop(row, loop)
        self._progress(row, loop.parent)

    def _progress(self, row: RowState, scope: int) -> None:
        """Something in `scope` is done: advance or end the loops that this completes, inside out."""
        loops = row.program.loops
        while scope != ROOT:
            loop = loops[scope]
            if row.done & loop.members != loop.members:
                return
            if not row.stopping & loop.bit and row.iterations[scope] + 1 < row.limits[scope]:
                self._advance(row, loop)
                return
            self._end_loop(row, loop)
            scope = loop.parent
        if self.is_over(row):
            self._walk_over(row)

    def _advance(self, row: RowState, loop: LoopProgram) -> None:
        """All in the loop have run and used up their inputs, so the positions that loop-backs move to are empty."""
        row.done &= ~loop.inside
        row.iterations[loop.index] += 1
        for source, target in loop.promotes:
            if row.filled >> source & 1:
                row.ids[target] = row.ids[source]
                row.filled ^= 1 << source | 1 << target
        self._skip_loops(row, loop.children)
        nodes = row.program.nodes
        for index in loop.nodes:
            self.try_ready(row, nodes[index])

    def _skip_loops(self, row: RowState, loops: tuple[int, ...]) -> None:
        """End the loops with limit 0 among these and inside them. All count as done before the first one's outputs
        leave, so that an output makes no node of another ready."""
        skipped = list(self._without_iterations(row, loops))
        for loop in skipped:
            row.done |= loop.bit | loop.inside
        for loop in skipped:
            self._end_loop(row, loop)

    def _without_iterations(self, row: RowState, loops: tuple[int, ...]) -> Iterator[LoopProgram]:
        for index in loops:
            loop = row.program.loops[index]
            if row.limits[index]:
                yield from self._without_iterations(row, loop.children)
            else:
                yield loop

    def _end_loop(self, row: RowState, loop: LoopProgram) -> None:
        """Outputs leave before the loop around it is looked at, so that it can pass them on."""
        row.done |= loop.bit | loop.inside
        row.stopping &= ~(loop.bit | loop.inside)
        row.iterations[loop.index] = 0
        for position in loop.drops:
            self._drop(row, position)
        for cache, route in loop.outputs:
            value = row.caches[cache]
            row.caches[cache] = [] if row.program.caches[cache] else NO_TENSOR
            self._route(row, route, value)
            self._refs.release(value)

    def _route(self, row: RowState, route: Route, value: Value) -> None:
        self._route_inside(row, route, value)
        for peer, slot in route.remotes:
            self._outflow.edge(peer, slot, row.handle, value)
        for modality in route.emits:
            self._outflow.emit(route.key, route.signal, modality, row.handle, value)
        for op in route.streams:
            for one in [value] if isinstance(value, int) else value:
                if one != NO_TENSOR and self._desk.produce(row.request, op, one):
                    self._wake(row.request, op.edge)
        for op in route.persists:
            self.persist(row, op, value)

    def _route_inside(self, row: RowState, route: Route, value: Value) -> None:
        for position in route.following:
            self._set(row, position, value)
        for cache, accumulate in route.caches:
            self._note(row, cache, accumulate, value)
        for position in route.local:
            self._fill(row, position, value)

    def _note(self, row: RowState, cache: int, accumulate: bool, value: Value) -> None:
        self._refs.retain(value)
        if not accumulate:
            self._refs.release(row.caches[cache])
            row.caches[cache] = value
            return
        values = row.caches[cache]
        assert isinstance(values, list)  # made so by enter and _end_loop
        if not isinstance(value, int):
            values.extend(value)
        elif value != NO_TENSOR:
            values.append(value)

    def _fill(self, row: RowState, position: int, value: Value) -> None:
        """A value for this iteration; too late when its reader's loop has ended."""
        node = row.program.nodes[row.program.readers[position]]
        if not row.done & node.bit:
            self._set(row, position, value)
            self.try_ready(row, node)

    def _set(self, row: RowState, position: int, value: Value) -> None:
        if row.program.many[position] and isinstance(value, int):
            value = [] if value == NO_TENSOR else [value]
        self._refs.retain(value)
        row.ids[position] = value
        row.filled |= 1 << position

    def _drop(self, row: RowState, position: int) -> None:
        if row.filled >> position & 1:
            self._refs.release(row.ids[position])
            row.ids[position] = NO_TENSOR
            row.filled ^= 1 << position

    def _has_iterated(self, row: RowState, scope: int) -> bool:
        while scope != ROOT:
            if row.iterations[scope]:
                return True
            scope = row.program.loops[scope].parent
        return False
