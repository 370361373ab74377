"""Both ends of a request's streams on one worker: counting what is made, buffering what is consumed, credit.

On the worker's loop thread. A producer whose items ahead of its consumer reach the connection's credit is gated
`STREAM_FULL`; with a step in flight and one armed on top of it, it may be a few items further ahead.
"""

from __future__ import annotations

from mstar.graph.outflow import Outflow
from mstar.graph.program import CompiledGraph, NodeProgram, StreamOp, StreamProgram
from mstar.graph.protocol import Gate, GraphError
from mstar.graph.ready import ReadyIndex
from mstar.graph.references import References
from mstar.graph.rows import RequestState, RowState
from mstar.streaming.buffer import StreamBuffer


class StreamDesk:
    """Keeps the streams of all requests; what an arrival lets run is the caller's concern."""

    def __init__(self, graph: CompiledGraph, me: int, refs: References, outflow: Outflow, ready: ReadyIndex) -> None:
        self.streams = graph.streams
        self._me = me
        self._refs = refs
        self._outflow = outflow
        self._ready = ready
        index = {partition.name: partition.index for partition in graph.partitions}
        self.producer_of = [index[stream.producer] for stream in graph.streams]
        self.consumer_of = [index[stream.consumer] for stream in graph.streams]

    def buffer(self, request: RequestState, edge: int) -> StreamBuffer:
        """Made when first needed: an item may come before its partition is started."""
        found = request.buffers.get(edge)
        if found is None:
            found = request.buffers[edge] = StreamBuffer(self.streams[edge].policy)
        return found

    def produce(self, request: RequestState, op: StreamOp, tensor_id: int) -> bool:
        """One more item. True: its consumer is here and may have something to run."""
        edge = op.edge
        if edge in request.muted:
            return False
        made = request.made[edge] = request.made.get(edge, 0) + 1
        if made - request.credited.get(edge, 0) >= self.streams[edge].credit and edge not in request.full:
            request.full.add(edge)
            self._gate_producer(request, edge)
        if op.peer != self._me:
            self._outflow.stream(op.peer, request.handle, edge, tensor_id, op.tag)
            return False
        self._refs.retain(tensor_id)
        self.buffer(request, edge).put(tensor_id, op.tag)
        return True

    def receive(self, request: RequestState, edge: int, tensor_id: int, tag: int) -> bool:
        """An item from another worker. False: its consumer has ended, so it is dropped and credited."""
        if edge in request.muted:
            self._refs.pass_through((tensor_id,))
            self._credit(request, edge, 1)
            return False
        buffer = self.buffer(request, edge)
        try:
            buffer.put(tensor_id, tag)
        except ValueError as error:
            raise self._named(edge, error) from None
        self._refs.retain(tensor_id)
        return True

    def end(self, request: RequestState, edge: int, total: int) -> bool:
        if edge in request.muted:
            return False
        try:
            self.buffer(request, edge).end(total)
        except ValueError as error:
            raise self._named(edge, error) from None
        return True

    def credit(self, request: RequestState, edge: int, count: int) -> None:
        """The consumer, wherever it is, will not need `count` items any more."""
        credited = request.credited[edge] = request.credited.get(edge, 0) + count
        if edge in request.full and request.made[edge] - credited < self.streams[edge].credit:
            request.full.discard(edge)
            self._gate_producer(request, edge)

    def chunks_ready(self, row: RowState, node: NodeProgram) -> bool:
        """Each stream input of the node has a chunk, or will never have one."""
        return all(self._chunk_ready(row, stream.edge) for stream in node.streams)

    def take(self, row: RowState, node: NodeProgram) -> tuple[list[list[int]], bool]:
        """A chunk per stream input, and whether the streams are exhausted by it."""
        chunks, final = [], True
        for _, edge in node.streams:
            buffer = self.buffer(row.request, edge)
            chunks.append(buffer.take() if self._has_items(row, edge) and buffer.has_chunk else buffer.take_nothing())
            final = final and buffer.exhausted
            row.used_streams |= 1 << edge
        return chunks, final

    def give_back(self, row: RowState, node: NodeProgram) -> None:
        """Undo the newest `take` of the node."""
        for _, edge in node.streams:
            self.buffer(row.request, edge).give_back()

    def commit(self, row: RowState, node: NodeProgram) -> None:
        """The oldest chunks taken by the node have been used."""
        for _, edge in node.streams:
            self._commit(row.request, edge)

    def use_up(self, row: RowState) -> None:
        """A pass is over: it has used a chunk of each stream, whether or not a node has taken it (a loop around the
        node may have been skipped), so that no pass is repeated for ever."""
        for edge in row.program.streams:
            buffer = self.buffer(row.request, edge)
            if not row.used_streams >> edge & 1 and self._has_items(row, edge) and buffer.has_chunk:
                buffer.take()
                self._commit(row.request, edge)
        row.used_streams = 0

    def mute(self, request: RequestState, edge: int) -> None:
        """Nobody will consume what the stream brings: drop and credit what waits, and what is still to come."""
        request.muted.add(edge)
        buffer = request.buffers.pop(edge, None)
        if buffer is not None and (gone := buffer.clear()):
            self._refs.release(gone)
            self._credit(request, edge, len(gone))

    def report_end(self, request: RequestState, stream: StreamProgram) -> bool:
        """The producer has ended. True: the consumer is here."""
        if stream.index in request.ended or stream.producer_rank != self._me:
            return False
        request.ended.add(stream.index)
        total = request.made.get(stream.index, 0)
        if stream.consumer_rank == self._me:
            return self.end(request, stream.index, total)
        if stream.index not in request.muted:
            self._outflow.stream_end(stream.consumer_rank, request.handle, stream.index, total)
        return False

    def _commit(self, request: RequestState, edge: int) -> None:
        gone = self.buffer(request, edge).commit()
        if gone:
            self._refs.release(gone)
            self._credit(request, edge, len(gone))

    def _chunk_ready(self, row: RowState, edge: int) -> bool:
        buffer = self.buffer(row.request, edge)
        if buffer.exhausted:
            return True
        return buffer.has_chunk if self._has_items(row, edge) else buffer.next_tag is not None

    def _has_items(self, row: RowState, edge: int) -> bool:
        """The next item, if any, is for the row's walk. Where a plan chooses the walks, tags only cut chunks."""
        if not row.partition.stream_fed:
            return True
        return self.buffer(row.request, edge).next_tag in (row.program.walk_index, None)

    def _credit(self, request: RequestState, edge: int, count: int) -> None:
        stream = self.streams[edge]
        if stream.producer_rank == self._me:
            self.credit(request, edge, count)
        else:
            self._outflow.credit(stream.producer_rank, request.handle, edge, count)

    def _gate_producer(self, request: RequestState, edge: int) -> None:
        partition = self.producer_of[edge]
        row = request.rows.get(partition)
        if row is not None:
            full = any(self.producer_of[other] == partition for other in request.full)
            row.own_gates = row.own_gates | Gate.STREAM_FULL if full else row.own_gates & ~Gate.STREAM_FULL
            self._ready.regate(row)

    def _named(self, edge: int, error: ValueError) -> GraphError:
        stream = self.streams[edge]
        return GraphError(f"stream {stream.signal!r} to {stream.consumer_node!r}: {error}")
