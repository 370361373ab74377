"""When a walk of a row is over, and when the next pass of a stream-fed partition begins.

On the worker's loop thread. A stream-fed partition runs the walk that its next items are tagged with, once per chunk.
The worker where the streams arrive leads: it starts the passes and tells the partition's other workers by markers.
"""

from __future__ import annotations

from mstar.graph.machine import RowMachine
from mstar.graph.outflow import Outflow
from mstar.graph.program import CompiledGraph, WalkProgram
from mstar.graph.ready import ReadyIndex
from mstar.graph.references import References
from mstar.graph.rows import RequestState, RowState
from mstar.graph.stream_desk import StreamDesk
from mstar.streaming.buffer import StreamBuffer


class WalkTurns:
    """Owns the row machine, because each ends what the other begins."""

    def __init__(self, graph: CompiledGraph, me: int, refs: References, outflow: Outflow, ready: ReadyIndex) -> None:
        self._graph = graph
        self._me = me
        self._outflow = outflow
        self.desk = StreamDesk(graph, me, refs, outflow, ready)
        self.machine = RowMachine(refs, outflow, ready, self.desk, self._walk_over, self.wake)
        self._markers = [
            {slot: walk for walk, slot in partition.markers.passes.items()} if partition.markers is not None else {}
            for partition in graph.partitions
        ]

    def enter(self, row: RowState, program: WalkProgram) -> None:
        """A plan's next walk. One without anything to do here is over at once, and reported like any other end; the
        pass of a stream-fed partition is not, its caller begins the next."""
        self.machine.enter(row, program)
        if self.machine.is_over(row):
            self._close(row)
            if not row.partition.stream_fed:
                self._outflow.routed.walk_done.append((row.handle, row.partition.name))

    def settle(self, row: RowState) -> None:
        """Values have arrived for the row, or it is no longer armed: end its walk or begin its next pass."""
        if row.active:
            if self.machine.is_over(row):
                self._walk_over(row)
        elif row.partition.stream_fed:
            self._start_passes(row)

    def wake(self, request: RequestState, edge: int) -> None:
        """A stream's consumer here got an item or learned of the end."""
        row = request.rows.get(self.desk.consumer_of[edge])
        if row is None:
            return
        if row.active:
            for node in row.program.nodes:
                if node.streams:
                    self.machine.try_ready(row, node)
        elif row.partition.stream_fed:
            self._start_passes(row)

    def finish(self, request: RequestState, partition: int) -> None:
        """The partition runs no further walk here: end what it produces, drop what it would have consumed."""
        if partition in request.closed:
            return
        request.closed.add(partition)
        program = self._graph.partitions[partition]
        for edge in program.streams_in:
            # Where the consumer is elsewhere, its part may still run although this worker's has ended.
            if self.desk.streams[edge].consumer_rank == self._me or partition not in request.rows:
                self.desk.mute(request, edge)
        for edge in program.streams_out:
            if self.desk.report_end(request, self.desk.streams[edge]):
                self.wake(request, edge)

    def _walk_over(self, row: RowState) -> None:
        self._close(row)
        if row.partition.stream_fed:
            self.desk.use_up(row)
            self._start_passes(row)
        else:
            self._outflow.routed.walk_done.append((row.handle, row.partition.name))

    def _close(self, row: RowState) -> None:
        row.active = False
        self.machine.empty_inputs(row)

    def _start_passes(self, row: RowState) -> None:
        while not row.active and not row.armed and row.partition.index not in row.request.closed:
            program = self._next_pass(row) if row.partition.lead_rank == self._me else self._followed_pass(row)
            if program is None:
                return
            row.passes += 1
            self.enter(row, program)
            if not row.active:
                self.desk.use_up(row)

    def _next_pass(self, row: RowState) -> WalkProgram | None:
        """The walk that the next items are tagged with, once each stream has a chunk of it."""
        waiting = [
            buffer for edge in row.partition.streams_in if not (buffer := self.desk.buffer(row.request, edge)).exhausted
        ]
        if not waiting:
            self._end_passes(row)
            return None
        tag = waiting[0].next_tag
        if tag is None or not all(_is_known(buffer, tag) for buffer in waiting):
            return None
        walk = self._graph.walk_names[tag]
        if row.partition.markers is not None:
            self._tell_others(row, row.partition.markers.passes[walk])
        return self._graph.programs[walk, self._me]

    def _followed_pass(self, row: RowState) -> WalkProgram | None:
        """The pass that the leading worker's next marker names."""
        assert row.partition.markers is not None  # a follower exists only where there are markers
        markers = self._markers[row.partition.index]
        for i, (slot, _) in enumerate(row.parked):
            if slot in markers:
                return self._graph.programs[markers[slot], self._me]
            if slot == row.partition.markers.end:
                del row.parked[i]
                self._end_passes(row)
                return None
        return None

    def _end_passes(self, row: RowState) -> None:
        if row.partition.markers is not None and row.partition.lead_rank == self._me:
            self._tell_others(row, row.partition.markers.end)
        self._outflow.routed.walk_done.append((row.handle, row.partition.name))
        self.finish(row.request, row.partition.index)

    def _tell_others(self, row: RowState, marker: int) -> None:
        for rank in row.partition.ranks:
            if rank != self._me:
                self._outflow.edge(rank, marker, row.handle, [])


def _is_known(buffer: StreamBuffer, tag: int) -> bool:
    """What a pass of walk `tag` takes from the stream: a chunk, or nothing because the next item is for another."""
    return buffer.has_chunk if buffer.next_tag == tag else buffer.next_tag is not None
