"""`PyGraphRuntime`: the graph runtime in Python, over the tables of `mstar.graph.compile`.

Owned by the worker's loop thread. Checks a call's arguments, then works on columns: what concerns whole columns
(emits, edges to other workers, streams) in one go, the rest row by row through `mstar.graph.machine`, and the steady
case, a node alone in its loop with a live loop-back, on a short path of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mstar.graph.keys import KeyTable
from mstar.graph.outflow import Outflow
from mstar.graph.passes import WalkTurns
from mstar.graph.program import CompiledGraph
from mstar.graph.protocol import Cols, Gate, GraphError, ReadyKey, Routed, SpecTaken, SpecTarget, TakenRows, TensorBooks
from mstar.graph.ready import ReadyIndex
from mstar.graph.references import References
from mstar.graph.requests import Requests
from mstar.graph.speculation import Speculations
from mstar.graph.steps import Steps


class PyGraphRuntime:
    """Implements `mstar.graph.protocol.GraphRuntime`."""

    def __init__(
        self,
        compiled: CompiledGraph,
        me: int,
        books: TensorBooks,
        disable_spec_node_walks: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        """`me`: the rank of this worker. `disable_spec_node_walks`: (node, walk) pairs that are never speculated on."""
        refs = References(books)
        self._outflow = Outflow(refs)
        self._ready = ReadyIndex(compiled, me)
        self._turns = WalkTurns(compiled, me, refs, self._outflow, self._ready)
        self._requests = Requests(compiled, me, refs, self._ready, self._turns)
        keys = KeyTable(compiled, me, disable_spec_node_walks, self._requests.rows, self._ready, self._turns.desk)
        self._keys = keys
        self._steps = Steps(keys, refs, self._outflow, self._ready, self._turns)
        self._speculations = Speculations(keys, self._turns)
        self._num_streams = len(compiled.streams)

    def add(
        self,
        handle: int,
        partition: str,
        walk: str | None,
        limits: Mapping[str, int],
        open_on: Collection[int] | None = None,
    ) -> None:
        self._requests.add(handle, partition, walk, limits, open_on)
        self._outflow.end()

    def remove(self, handle: int) -> list[int]:
        routed = Routed()
        self._requests.remove(handle)
        self._outflow.end(routed)
        return routed.freed

    def knows(self, handle: int) -> bool:
        return self._requests.find(handle) is not None

    def set_walk(self, handle: int, partition: str, walk: str) -> None:
        self._requests.set_walk(handle, partition, walk)
        self._outflow.end()

    def set_limits(self, handle: int, partition: str, limits: Mapping[str, int]) -> None:
        self._requests.set_limits(handle, partition, limits)
        self._outflow.end()

    def partition_idle(self, handle: int, partition: str) -> bool:
        return self._requests.partition_idle(handle, partition)

    def end_streams(self, handle: int, partition: str, routed: Routed) -> None:
        self._requests.end_streams(handle, partition)
        self._outflow.end()
        self._outflow.collect(routed)

    def collect(self, routed: Routed) -> None:
        self._outflow.collect(routed)

    def gate(self, handles: Sequence[int], bits: Gate, on: bool, partition: str | None = None) -> None:
        self._requests.gate(handles, bits, on, partition)

    def ready_behind(self, handle: int, gate: Gate) -> bool:
        return self._requests.ready_behind(handle, gate)

    def ingest(self, block: Cols) -> list[int]:
        refused = self._requests.ingest(block)
        self._outflow.end()
        return refused

    def persist(self, handle: int, partition: str, name: str, tensor_id: int) -> None:
        self._requests.persist(handle, partition, name, tensor_id)
        self._outflow.end()

    def unpersist(self, handle: int, partition: str, name: str) -> list[int]:
        routed = Routed()
        self._requests.unpersist(handle, partition, name)
        self._outflow.end(routed)
        return routed.freed

    def stream_put(
        self, handles: Sequence[int], edges: Sequence[int], ids: Sequence[int], tags: Sequence[int]
    ) -> list[int]:
        self._check_streams(edges)
        refused: list[int] = []
        for i, (handle, edge, one, tag) in enumerate(zip(handles, edges, ids, tags, strict=True)):
            request = self._requests.find(handle)
            if request is None:
                refused.append(i)
            elif self._turns.desk.receive(request, edge, int(one), int(tag)):
                self._turns.wake(request, edge)
        self._outflow.end()
        return refused

    def stream_end(self, handle: int, edge: int, total: int) -> None:
        self._check_streams((edge,))
        request = self._requests.request(handle)
        if self._turns.desk.end(request, edge, total):
            self._turns.wake(request, edge)
        self._outflow.end()

    def stream_credit(self, handles: Sequence[int], edges: Sequence[int], counts: Sequence[int]) -> None:
        self._check_streams(edges)
        for handle, edge, count in zip(handles, edges, counts, strict=True):
            request = self._requests.find(handle)
            if request is not None:
                self._turns.desk.credit(request, edge, count)

    def ready_keys(self) -> list[ReadyKey]:
        return self._ready.keys()

    def peek(self, key: ReadyKey, limit: int) -> list[int]:
        return self._keys.entry(key).queue.peek(limit)

    def take(self, key: ReadyKey, rows: Sequence[int]) -> TakenRows:
        return self._steps.take(key, list(rows))

    def give_back(self, key: ReadyKey, rows: Sequence[int]) -> None:
        self._steps.give_back(key, list(rows))

    def carriable(self, key: ReadyKey, rows: Sequence[int]) -> list[int]:
        return self._steps.carriable(key, rows)

    def speculate_node(self, key: ReadyKey, rows: Sequence[int]) -> list[SpecTarget]:
        return self._speculations.targets(key, rows)

    def spec_prepare(self, key: ReadyKey, rows: Sequence[int]) -> SpecTaken:
        return self._speculations.prepare(key, list(rows))

    def spec_going(self, spec_id: int) -> list[int]:
        return self._speculations.going(spec_id)

    def spec_settle(self, spec_id: int, keep: Sequence[int]) -> None:
        self._speculations.settle(spec_id, keep)
        self._outflow.end()

    def stop_loops(self, rows: Sequence[int], loops: Sequence[str]) -> None:
        self._requests.stop_loops(rows, loops)

    def complete(self, key: ReadyKey, rows: Sequence[int], ids: Mapping[str, Sequence[int]], routed: Routed) -> None:
        self._steps.complete(key, list(rows), ids)
        self._outflow.end()
        self._outflow.collect(routed)

    def fail(self, rows: Sequence[int]) -> None:
        self._requests.fail(rows)

    def _check_streams(self, edges: Sequence[int]) -> None:
        for edge in edges:
            if not 0 <= edge < self._num_streams:
                raise GraphError(f"there is no stream {edge}; the graph has {self._num_streams}")
