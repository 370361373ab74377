"""What a declared graph means: a direct interpreter of the declarations.

It knows nothing of compiled tables, workers, handles or ids: it runs sections recursively and hands values around in
dicts. Slow and short; the runtime is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

from support.graph_behaviour import Behaviour, Plain, as_tuple

from mstar.graph.base import (
    EMIT_TO_CLIENT,
    EMPTY_DESTINATION,
    GraphEdge,
    GraphNode,
    GraphSection,
    Loop,
    LoopLimit,
    Parallel,
    Sequential,
    Walks,
)
from mstar.streaming.chunk_policy import ChunkPolicy
from mstar.streaming.topology import Connection, PartitionTopology

Feed = dict[tuple[str, str], Plain]
"""(node, input) → value."""


@dataclass
class ScopeResult:
    """One iteration of a scope: values by (producing unit, signal), the next iteration's feeds, what was persisted."""

    values: dict[tuple[str, str], Plain] = field(default_factory=dict)
    following: Feed = field(default_factory=dict)
    persisted: dict[str, Plain] = field(default_factory=dict)


@dataclass
class Stream:
    """All items of a connection, and the chunks made of them that its consumer takes one after the other."""

    connection: Connection
    items: list[tuple[int, str]] = field(default_factory=list)
    chunks: list[tuple[list[int], str]] | None = None
    num_taken: int = 0

    def next_tag(self) -> str | None:
        """The walk that the next chunk is for; None after the last."""
        left = self._left()
        return left[0][1] if left else None

    def take(self, walk: str | None) -> list[int]:
        """The next chunk, if it is for `walk` (None: whatever it is for)."""
        left = self._left()
        if not left or walk not in (None, left[0][1]):
            return []
        self.num_taken += 1
        return left.pop(0)[0]

    def _left(self) -> list[tuple[list[int], str]]:
        if self.chunks is None:
            self.chunks = [
                (chunk, tag)
                for tag, run in groupby(self.items, key=lambda item: item[1])
                for chunk in cut([value for value, _ in run], self.connection.policy)
            ]
        return self.chunks


def cut(run: list[int], policy: ChunkPolicy) -> list[list[int]]:
    """Chunks of items with equal tags."""
    chunks = []
    at = 0
    while at < len(run):
        size = policy.first if at == 0 and policy.first is not None else policy.stride
        chunks.append(run[max(0, at - policy.context) : at + size])
        at += size
    return chunks


class Reference:
    """Runs one request. `emits[(node, walk, signal)]` are the values sent to the client, in order."""

    def __init__(
        self,
        walks: Walks,
        topology: PartitionTopology,
        behaviour: Behaviour,
        limits: Mapping[str, int],
        inputs: Mapping[str, int],
    ) -> None:
        self.walks = walks
        self.topology = topology
        self.behaviour = behaviour
        self.limits = limits
        self.kept: dict[str, dict[str, Plain]] = {p.name: dict(inputs) for p in topology.partitions}
        self.emits: dict[tuple[str, str, str], list[int]] = {}
        self.streams = [Stream(connection) for connection in topology.connections]
        self.stopping: set[str] = set()
        self.partition = ""
        self.walk = ""

    def run(self, plans: Mapping[str, Sequence[str]]) -> dict[tuple[str, str, str], list[int]]:
        """`plans`: the walks of each partition; producers come before consumers in the topology."""
        for partition in self.topology.partitions:
            self.partition = partition.name
            if partition.stream_fed:
                own = [stream for stream in self.streams if stream.connection.consumer == partition.name]
                for number in count():
                    tags = [tag for stream in own if (tag := stream.next_tag()) is not None]
                    if not tags:
                        break
                    before = [stream.num_taken for stream in own]
                    self._run_walk(tags[0], number)
                    for stream, taken in zip(own, before, strict=True):
                        if stream.num_taken == taken:
                            stream.take(tags[0])  # a pass uses a chunk even if its node was in a skipped loop
            else:
                for walk in plans.get(partition.name, ()):
                    self._run_walk(walk, 0)
        return self.emits

    def _run_walk(self, walk: str, number: int) -> None:
        self.walk = walk
        section, kept = self.walks[walk], self.kept[self.partition]
        feed: Feed = {(node.name, name): kept.get(name) for node in _nodes(section) for name in node.input_names}
        result = self._run_scope(section, feed, number, ())
        kept.update({name: value for name, value in result.persisted.items() if value is not None})

    def _run_scope(self, section: GraphSection, feed: Feed, iteration: int, loops: tuple[str, ...]) -> ScopeResult:
        """Run everything in a section once, whatever may go first."""
        result = ScopeResult()
        feed = dict(feed)
        waiting = list(_units(section))
        while waiting:
            unit = next(u for u in waiting if not any(_feeds(section, o, u) for o in waiting if o is not u))
            waiting.remove(unit)
            if isinstance(unit, GraphNode):
                values = self._run_node(unit, feed, iteration, loops)
            else:
                values, persisted = self._run_loop(unit, feed, loops)
                result.persisted.update(persisted)
            for edge in unit.outputs:
                value = values[edge.name]
                result.values[unit.name, edge.name] = value
                if edge.persist:
                    result.persisted[edge.name] = value
                if edge.target_partition is not None:
                    self._stream(edge, value)
                elif edge.next_node == EMIT_TO_CLIENT:
                    if as_tuple(value):
                        key = (_origin(unit, edge.name), self.walk, edge.name)
                        self.emits.setdefault(key, []).extend(as_tuple(value))
                elif edge.next_node != EMPTY_DESTINATION:
                    to = feed if _is_later(section, unit, edge.next_node) else result.following
                    to[edge.next_node, edge.name] = value
        return result

    def _run_loop(self, loop: Loop, feed: Feed, loops: tuple[str, ...]) -> tuple[dict[str, Plain], dict[str, Plain]]:
        """Values of the loop's outputs, and what was persisted in its last iteration."""
        limit = self.limits[loop.max_iters.name] if isinstance(loop.max_iters, LoopLimit) else loop.max_iters
        values: dict[str, Plain] = {edge.name: None for edge in loop.outputs}
        persisted = _nothing_persisted(loop.section)
        carried: Feed = {}
        for iteration in range(limit):
            result = self._run_scope(loop.section, {**feed, **carried}, iteration, (loop.name, *loops))
            carried = result.following
            persisted = {**_nothing_persisted(loop.section), **result.persisted}
            for name in values:
                value = next(value for (_, signal), value in result.values.items() if signal == name)
                if name in loop.accumulated_outputs:
                    value = [*as_tuple(values[name]), *as_tuple(value)]
                values[name] = value
            if loop.name in self.stopping:
                break
        self.stopping.discard(loop.name)
        return values, persisted

    def _run_node(self, node: GraphNode, feed: Feed, iteration: int, loops: tuple[str, ...]) -> dict[str, Plain]:
        streams = {
            stream.connection.signal: stream
            for stream in self.streams
            if stream.connection.consumer == self.partition and stream.connection.consumer_node == node.name
        }
        fed = next(p for p in self.topology.partitions if p.name == self.partition).stream_fed
        inputs: dict[str, Plain] = {
            name: streams[name].take(self.walk if fed else None) if name in streams else feed[node.name, name]
            for name in node.input_names
        }
        taken = [streams[name] for name in node.input_names if name in streams]
        final = bool(taken) and all(stream.next_tag() is None for stream in taken)
        signals = list(dict.fromkeys(edge.name for edge in node.outputs))
        values = self.behaviour.run(node.name, self.walk, signals, inputs, iteration, final)
        self.stopping.update(self.behaviour.stops(node.name, self.walk, values, loops))
        return dict(values)

    def _stream(self, edge: GraphEdge, value: Plain) -> None:
        for stream in self.streams:
            own = stream.connection
            if (own.signal, own.consumer, own.consumer_node) == (edge.name, edge.target_partition, edge.next_node):
                walk = own.consumer_walk
                tag = walk if isinstance(walk, str) else dict(walk)[self.walk]
                stream.items += [(one, tag) for one in as_tuple(value)]


def _units(section: GraphSection) -> Iterator[GraphNode | Loop]:
    """Nodes and loops of a section, not looking into loops."""
    match section:
        case GraphNode() | Loop():
            yield section
        case Sequential(sections=parts) | Parallel(sections=parts):
            for part in parts:
                yield from _units(part)


def _nodes(section: GraphSection) -> Iterator[GraphNode]:
    for unit in _units(section):
        if isinstance(unit, GraphNode):
            yield unit
        else:
            yield from _nodes(unit.section)


def _nothing_persisted(section: GraphSection) -> dict[str, Plain]:
    """Every name that is persisted somewhere in the section, inner loops included: absent."""
    names: dict[str, Plain] = {}
    for unit in _units(section):
        names.update({edge.name: None for edge in unit.outputs if edge.persist})
        if isinstance(unit, Loop):
            names.update(_nothing_persisted(unit.section))
    return names


def _feeds(section: GraphSection, producer: GraphNode | Loop, consumer: GraphNode | Loop) -> bool:
    """The consumer needs a value that the producer makes in the same iteration."""
    names = {consumer.name} if isinstance(consumer, GraphNode) else {node.name for node in _nodes(consumer.section)}
    return any(
        edge.next_node in names and edge.target_partition is None and _is_later(section, producer, edge.next_node)
        for edge in producer.outputs
    )


def _is_later(section: GraphSection, producer: GraphNode | Loop, consumer: str) -> bool:
    """The consumer comes after the producer in the same iteration of the section, by the written order."""
    if not isinstance(section, Sequential | Parallel):
        return False  # both are in this node or loop
    places = [{unit.name for unit in _units(part)} for part in section.sections]
    nodes = [{node.name for node in _nodes(part)} for part in section.sections]
    here = next(i for i, names in enumerate(places) if producer.name in names)
    there = next(i for i, names in enumerate(nodes) if consumer in names)
    if here == there:
        return _is_later(section.sections[here], producer, consumer)
    return there > here or isinstance(section, Parallel)


def _origin(unit: GraphNode | Loop, signal: str) -> str:
    """The node that made the value of a unit's output."""
    while isinstance(unit, Loop):
        unit = next(u for u in _units(unit.section) if any(edge.name == signal for edge in u.outputs))
    return unit.name
