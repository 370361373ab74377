"""A graph runtime on a bench: compiles a small graph, and takes and completes rows in one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from support.graph_books import CheckedBooks

from mstar.graph.base import EMIT_TO_CLIENT, EMPTY_DESTINATION, GraphEdge, GraphNode, GraphSection, nodes_of
from mstar.graph.compile import CompiledGraph, compile_walks
from mstar.graph.protocol import LIVE_COLUMN, GraphRuntime, ReadyKey, Routed, SlotRef, TakenRows
from mstar.graph.runtime import PyGraphRuntime
from mstar.streaming.topology import Partition, PartitionTopology


def edge(to: str, name: str, **more: object) -> GraphEdge:
    return GraphEdge(to, name, **more)  # type: ignore[arg-type]


def emit(name: str) -> GraphEdge:
    return GraphEdge(EMIT_TO_CLIENT, name, output_modality="text")


def keep(name: str) -> GraphEdge:
    return GraphEdge(EMPTY_DESTINATION, name, persist=True)


def node(name: str, inputs: Sequence[str] = (), outputs: Sequence[GraphEdge] = (), **more: object) -> GraphNode:
    return GraphNode(name, tuple(inputs), tuple(outputs), **more)  # type: ignore[arg-type]


def compile_one(
    walks: Mapping[str, GraphSection],
    request_inputs: Sequence[str] = (),
    placement: Mapping[str, int] | None = None,
    topology: PartitionTopology | None = None,
) -> CompiledGraph:
    """All walks in one partition `main`, all nodes on worker 0, unless said otherwise."""
    if topology is None:
        topology = PartitionTopology((Partition("main", tuple(walks), request_inputs=tuple(request_inputs)),))
    names = {one.name for section in walks.values() for one in nodes_of(section)}
    return compile_walks(walks, topology, dict.fromkeys(names, 0) | dict(placement or {}))


class GraphBench:
    """One runtime. Ids that `out` and `put` make are 1, 2, ... in that order."""

    def __init__(self, graph: CompiledGraph, me: int = 0, disabled: frozenset[tuple[str, str]] = frozenset()) -> None:
        self.compiled = graph
        self.books = CheckedBooks()
        self.graph: GraphRuntime = PyGraphRuntime(graph, me, self.books, disable_spec_node_walks=disabled)
        self.routed = Routed()

    def add(self, *handles: int, walk: str | None, partition: str = "main", **limits: int) -> None:
        for handle in handles:
            self.graph.add(handle, partition, walk, limits)

    def put(self, count: int = 1) -> list[int]:
        return [self.books.put(0) for _ in range(count)]

    def ready(self) -> list[tuple[str, list[int]]]:
        """Every key with its rows: (node, handles)."""
        return [(key.node, self.graph.peek(key, 100)) for key in self.graph.ready_keys()]

    def take(self, name: str, walk: str, *rows: int) -> TakenRows:
        """All ready rows, or those given."""
        key = ReadyKey(name, walk)
        return self.graph.take(key, list(rows) or self.graph.peek(key, 100))

    def complete(self, name: str, walk: str, rows: Sequence[int], **out: Sequence[int]) -> Routed:
        routed = Routed()
        self.graph.complete(ReadyKey(name, walk), rows, out, routed)
        self.books.free(routed.freed)
        return routed

    def run(self, name: str, walk: str, *rows: int, live: Sequence[str] = ()) -> tuple[TakenRows, Routed]:
        """Take ready rows and complete them with new tensors, or live values, for every output."""
        taken = self.take(name, walk, *rows)
        return taken, self.finish(taken, live=live)

    def finish(self, taken: TakenRows, live: Sequence[str] = ()) -> Routed:
        program = self.compiled.programs[taken.key.walk, self.compiled.placement[taken.key.node]]
        routes = next(one.routes for one in program.nodes if one.key == taken.key)
        out = {
            route.signal: [LIVE_COLUMN] * len(taken.rows) if route.signal in live else self.put(len(taken.rows))
            for route in routes
        }
        return self.complete(taken.key.node, taken.key.walk, taken.rows, **out)

    def collect(self) -> Routed:
        routed = Routed()
        self.graph.collect(routed)
        self.books.free(routed.freed)
        return routed

    def slot(self, walk: str, name: str, signal: str) -> int:
        return self.compiled.slots.index(SlotRef(walk, name, signal))

    def remove(self, *handles: int) -> None:
        for handle in handles:
            self.books.free(self.graph.remove(handle))

    def release_outgoing(self, routed: Routed) -> None:
        """What the outbox does once everything is sent."""
        for columns in [*routed.edges.values(), *routed.streams.values(), *routed.emits]:
            self.books.free(self.books.release([one for one in columns.ids if one > 0]))

    def nothing_left(self) -> bool:
        return not self.books.values
