"""The requests of one worker's runtime: opening, walks, limits, gates, persisted signals, arrivals, removal.

On the worker's loop thread. Arguments are checked here; nothing has changed when `GraphError` is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mstar.graph.passes import WalkTurns
from mstar.graph.program import CompiledGraph, LoopProgram, PartitionProgram, WalkProgram
from mstar.graph.protocol import Cols, Gate, GraphError
from mstar.graph.ready import ReadyIndex
from mstar.graph.references import References
from mstar.graph.rows import RequestState, RowState


class Requests:
    """`rows[p]` are the rows of partition p by handle."""

    def __init__(self, graph: CompiledGraph, me: int, refs: References, ready: ReadyIndex, turns: WalkTurns) -> None:
        self._graph = graph
        self._me = me
        self._refs = refs
        self._ready = ready
        self._turns = turns
        self._index = {partition.name: partition.index for partition in graph.partitions}
        self._requests: dict[int, RequestState] = {}
        self.rows: list[dict[int, RowState]] = [{} for _ in graph.partitions]
        self._loops: dict[str, dict[str, LoopProgram]] = {
            walk: {loop.name: loop for loop in program.loops}
            for (walk, rank), program in graph.programs.items()
            if rank == me
        }
        self._partition_of_loop = {
            loop.name: self._index[program.partition] for program in graph.programs.values() for loop in program.loops
        }
        self._bound_here = [
            {
                external.name
                for walk in partition.walks
                if (walk, me) in graph.programs
                for external in graph.programs[walk, me].externals
            }
            for partition in graph.partitions
        ]

    def request(self, handle: int) -> RequestState:
        """Raises:
        GraphError: the runtime does not know the handle.
        """
        found = self._requests.get(handle)
        if found is None:
            raise GraphError(f"handle {handle} is unknown; add it first, or it was removed")
        return found

    def find(self, handle: int) -> RequestState | None:
        return self._requests.get(handle)

    def row(self, handle: int, partition: str) -> RowState:
        """Raises:
        GraphError: the handle is unknown or has not started the partition here.
        """
        found = self.request(handle).rows.get(self.partition(partition).index)
        if found is None:
            raise GraphError(f"handle {handle} has not started partition {partition!r} on worker {self._me}")
        return found

    def partition(self, name: str) -> PartitionProgram:
        index = self._index.get(name)
        if index is None:
            raise GraphError(f"there is no partition {name!r}; the graph has {sorted(self._index)}")
        return self._graph.partitions[index]

    def add(
        self,
        handle: int,
        name: str,
        walk: str | None,
        limits: Mapping[str, int],
        open_on: Collection[int] | None = None,
    ) -> None:
        partition = self.partition(name)
        request = self._requests.get(handle)
        if self._me not in partition.ranks:
            raise GraphError(f"worker {self._me} has no node of partition {name!r} (workers {list(partition.ranks)})")
        if request is not None and (partition.index in request.rows or partition.index in request.closed):
            raise GraphError(f"handle {handle} has started or finished partition {name!r} already")
        if walk is None and not partition.stream_fed:
            raise GraphError(
                f"partition {name!r} is not stream-fed: name its first walk, one of {list(partition.walks)}"
            )
        program = self._program(partition, walk if walk is not None else partition.walks[0])
        named = self._limits(partition, limits, {})
        for entered in partition.walks if partition.stream_fed else (program.walk,):
            self._require_limits(self._program(partition, entered), named)
        if request is None:
            request = self._requests[handle] = RequestState(handle)
        request.open_on = open_on
        row = RowState(request, partition, program)
        row.named_limits = named
        request.rows[partition.index] = self.rows[partition.index][handle] = row
        self._ready.regate(row)
        if partition.stream_fed:
            self._turns.settle(row)
        else:
            self._turns.enter(row, program)

    def remove(self, handle: int) -> None:
        request = self.request(handle)
        for row in request.rows.values():
            if row.running or row.armed:
                raise GraphError(
                    f"handle {handle} is in a step of partition {row.partition.name!r}; complete or fail it"
                )
        for row in request.rows.values():
            for node in row.program.nodes:
                if row.ready & node.bit:
                    self._ready.remove(row, node)
            self._turns.machine.empty(row)
            del self.rows[row.partition.index][handle]
        for kept in request.persisted.values():
            for value in kept.values():
                self._refs.release(value)
        for buffer in request.buffers.values():
            self._refs.release(buffer.clear())
        del self._requests[handle]

    def set_walk(self, handle: int, name: str, walk: str) -> None:
        row = self.row(handle, name)
        program = self._program(row.partition, walk)
        if row.partition.stream_fed:
            raise GraphError(f"partition {name!r} is stream-fed: the tags of its items choose its walks")
        if row.active or row.armed:
            raise GraphError(f"handle {handle} cannot enter {walk!r}: its walk {row.program.walk!r} has not ended")
        if row.partition.index in row.request.closed:
            raise GraphError(f"handle {handle} has finished partition {name!r}")
        self._require_limits(program, row.named_limits)
        self._turns.enter(row, program)

    def set_limits(self, handle: int, name: str, limits: Mapping[str, int]) -> None:
        row = self.row(handle, name)
        named = self._limits(row.partition, limits, row.named_limits)
        changed = {limit for limit, value in named.items() if row.named_limits.get(limit) != value}
        affected = [loop for loop in row.program.loops if loop.max_iters < 0 and loop.limit in changed]
        if not row.active:
            affected = []
        for loop in affected:
            if (row.running | row.armed | row.done) & (loop.inside | loop.bit) or row.iterations[loop.index]:
                raise GraphError(f"loop {loop.name!r} of handle {handle} has started; its limit is settled")
        row.named_limits = named
        if affected:
            self._turns.machine.resolve_limits(row)
            for loop in affected:
                if row.limits[loop.index] == 0 and not row.done & loop.bit:
                    self._turns.machine.cut_short(row, loop)

    def partition_idle(self, handle: int, name: str) -> bool:
        row = self.request(handle).rows.get(self.partition(name).index)
        return row is None or not (row.active or row.armed)

    def end_streams(self, handle: int, name: str) -> None:
        request, partition = self.request(handle), self.partition(name)
        if not self.partition_idle(handle, name):
            raise GraphError(f"handle {handle} is in a walk of partition {name!r}, which cannot be its end")
        self._turns.finish(request, partition.index)

    def gate(self, handles: Sequence[int], bits: Gate, on: bool, name: str | None) -> None:
        requests = [self.request(handle) for handle in handles]
        rows = [self.row(handle, name) for handle in handles] if name is not None else []
        for row in rows:
            row.own_gates = row.own_gates | bits if on else row.own_gates & ~bits
            self._ready.regate(row)
        if name is None:
            for request in requests:
                request.gates = request.gates | bits if on else request.gates & ~bits
                for row in request.rows.values():
                    self._ready.regate(row)

    def ready_behind(self, handle: int, gate: Gate) -> bool:
        request = self._requests.get(handle)
        return request is not None and any(row.ready and not row.gates & ~gate for row in request.rows.values())

    def fail(self, handles: Sequence[int]) -> None:
        for request in [self.request(handle) for handle in handles]:
            request.gates |= Gate.FAILED
            for row in request.rows.values():
                row.running = row.armed = 0
                self._ready.regate(row)

    def ingest(self, block: Cols) -> list[int]:
        refused: list[int] = []
        counts = block.counts if block.counts is not None else [1] * len(block.handles)
        if not len(block.handles) == len(block.slots) == len(counts) or sum(counts) != len(block.ids):
            raise GraphError(
                f"columns of different lengths: {len(block.handles)} handles, {len(block.slots)} slots, {len(counts)} "
                f"counts of {sum(counts)} values, {len(block.ids)} ids"
            )
        if any(not 0 <= slot < len(self._graph.slots) for slot in block.slots):
            raise GraphError(
                f"a slot is outside the table of {len(self._graph.slots)}; both workers must compile alike"
            )
        first = 0
        for i, (handle, slot, count) in enumerate(zip(block.handles, block.slots, counts, strict=True)):
            ids = [int(one) for one in block.ids[first : first + count]]
            first += count
            partition = self._graph.slot_partitions[slot]
            row = self.rows[partition].get(handle)
            if row is None:
                refused.append(i)
            elif partition in row.request.closed:
                self._refs.pass_through(ids)
            else:
                self._turns.machine.arrive(row, slot, ids)
                self._turns.settle(row)
        return refused

    def persist(self, handle: int, name: str, signal: str, tensor_id: int) -> None:
        partition = self.partition(name)
        request = self._requests.get(handle)
        if signal not in self._bound_here[partition.index]:
            self._refs.pass_through((tensor_id,))
            return
        if request is None:
            request = self._requests[handle] = RequestState(handle)
        row = request.rows.get(partition.index)
        self._turns.machine.keep(request, partition, signal, tensor_id)
        if row is not None and row.active:
            self._turns.machine.bind_late(row, signal)

    def unpersist(self, handle: int, name: str, signal: str) -> None:
        kept = self.request(handle).persisted.get(self.partition(name).index, {})
        value = kept.pop(signal, None)
        if value is not None:
            self._refs.release(value)

    def stop_loops(self, handles: Sequence[int], loops: Sequence[str]) -> None:
        rows = []
        for handle, loop in zip(handles, loops, strict=True):
            partition = self._partition_of_loop.get(loop)
            if partition is None:
                raise GraphError(f"there is no loop {loop!r}; the graph has {sorted(self._partition_of_loop)}")
            row = self.rows[partition].get(handle)
            if row is None:
                raise GraphError(f"handle {handle} has no row with a loop {loop!r}")
            rows.append(row)
        for row, name in zip(rows, loops, strict=True):
            loop = self._loops[row.program.walk].get(name)
            if loop is not None and row.active and not row.done & loop.bit:
                row.stopping |= loop.bit

    def _program(self, partition: PartitionProgram, walk: str) -> WalkProgram:
        if walk not in partition.walks:
            raise GraphError(f"partition {partition.name!r} has no walk {walk!r}; it has {list(partition.walks)}")
        return self._graph.programs[walk, self._me]

    def _limits(self, partition: PartitionProgram, limits: Mapping[str, int], old: Mapping[str, int]) -> dict[str, int]:
        """`old` with what `limits` says of the partition's loops on this worker, checked."""
        named = dict(old)
        for walk in partition.walks:
            for loop in self._graph.programs[walk, self._me].loops:
                if loop.max_iters >= 0 or loop.limit not in limits:
                    continue
                value = limits[loop.limit]
                if value < 0:
                    raise GraphError(f"limit {loop.limit!r} is {value}; it must be 0 or more")
                named[loop.limit] = value
        return named

    @staticmethod
    def _require_limits(program: WalkProgram, named: Mapping[str, int]) -> None:
        """Every limit of a walk's loops is known when the walk is entered."""
        for loop in program.loops:
            if loop.max_iters < 0 and loop.limit not in named:
                raise GraphError(
                    f"loop {loop.name!r} of walk {program.walk!r} needs the limit {loop.limit!r}; got {dict(named)}"
                )
