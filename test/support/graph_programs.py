"""Random graphs that compile: nested sections, edges of every kind, partitions, streams, placements.

A generated graph is a value of its seed and size. Walks are grown as trees first; then inputs get sources that the
rules of `mstar.graph.compile.compile_walks` allow, and outputs get destinations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from support.graph_behaviour import Behaviour

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
)
from mstar.streaming.chunk_policy import fixed, left_context, sliding
from mstar.streaming.topology import Connection, Partition, PartitionTopology


@dataclass
class Program:
    """A graph and what a request of it brings. `plans`: walks per partition (none for a stream-fed one)."""

    walks: dict[str, GraphSection]
    topology: PartitionTopology
    limits: dict[str, int]
    plans: dict[str, list[str]]
    behaviour: Behaviour
    request_inputs: dict[str, list[str]]
    groups: list[set[str]]
    """Nodes that must be placed together."""

    def place(self, num_workers: int, rng: random.Random) -> dict[str, int]:
        return {node: rank for group in self.groups for rank in [rng.randrange(num_workers)] for node in sorted(group)}


@dataclass(eq=False)
class Draft:
    """A section under construction; `path` as in its parents: (they order their parts, index)."""

    path: tuple[tuple[bool, int], ...]
    around: tuple[LoopDraft, ...]


@dataclass(eq=False)
class NodeDraft(Draft):
    name: str
    inputs: list[str] = field(default_factory=list)
    optional: set[str] = field(default_factory=set)
    edges: list[GraphEdge] = field(default_factory=list)


@dataclass(eq=False)
class LoopDraft(Draft):
    name: str
    limit: int | LoopLimit
    body: Draft | None = None
    edges: list[GraphEdge] = field(default_factory=list)
    accumulated: set[str] = field(default_factory=set)


@dataclass(eq=False)
class ListDraft(Draft):
    ordered: bool
    parts: list[Draft] = field(default_factory=list)


Unit = NodeDraft | LoopDraft


class Grower:
    """Grows one program."""

    def __init__(self, seed: int, size: int, streams: bool, stop_odds: int) -> None:
        self.rng = random.Random(seed)
        self.size = size
        self.stop_odds = stop_odds
        self.streams = streams
        self.serial = 0
        self.limits: dict[str, int] = {}
        self.request_inputs: dict[str, list[str]] = {}
        self.drafts: dict[str, Draft] = {}
        self.signals: list[str] = []

    def grow(self) -> Program:
        rng = self.rng
        plans = {"A": [f"A{i}" for i in range(rng.randint(1, 3))]}
        partitions = {"A": plans["A"]}
        connections: list[Connection] = []
        if self.streams:
            partitions["B"] = [f"B{i}" for i in range(rng.randint(1, min(2, len(plans["A"]))))]
            if rng.random() < 0.4:
                plans["D"] = partitions["D"] = ["D0"]
        for partition, walks in partitions.items():
            self.request_inputs[partition] = []
            kept: list[str] = []
            for walk in walks:
                kept += self._grow_walk(partition, walk, kept)
            self._take_kept(walks, kept)
        if self.streams:
            connections = [self._connect(consumer, partitions) for consumer in list(partitions)[1:]]
            if rng.random() < 0.3:
                plans["A"] = plans["A"] * 2
        names = [name for name in self.signals if rng.random() < 0.15]
        return Program(
            walks={walk: _freeze(draft) for walk, draft in self.drafts.items()},
            topology=PartitionTopology(
                tuple(
                    Partition(name, tuple(walks), name == "B", tuple(self.request_inputs[name]))
                    for name, walks in partitions.items()
                ),
                tuple(connections),
            ),
            limits=self.limits,
            plans=plans,
            behaviour=Behaviour(frozenset(names), self.stop_odds),
            request_inputs=self.request_inputs,
            groups=self._groups(),
        )

    def _grow_walk(self, partition: str, walk: str, kept: list[str]) -> list[str]:
        """Returns the names that the walk persists."""
        rng = self.rng
        self.budget = rng.randint(1, self.size)
        spine = ListDraft((), (), True)
        spine.parts = [self._section(((True, 0),), (), 0), self._section(((True, 1),), (), 0)]
        self.drafts[walk] = spine
        # A node by the same name in all walks of the partition: it makes and takes the streams.
        rng.choice(list(_nodes(spine))).name = f"{partition}.main"
        self.used: set[str] = set()
        for node in _nodes(spine):
            for _ in range(rng.choice((0, 1, 1, 2))):
                self._add_input(spine, node, partition, kept)
        for unit in list(_all_units(spine)):
            if rng.random() < (0.7 if isinstance(unit, NodeDraft) else 0.4):
                self._output(unit, self._name("e"), EMIT_TO_CLIENT, output_modality="text")
        persisted = []
        for unit in list(_all_units(spine)):
            if rng.random() < 0.2:
                name = self._name("p")
                if self._output(unit, name, EMPTY_DESTINATION, persist=True):
                    persisted.append(name)
        return persisted

    def _section(self, path: tuple[tuple[bool, int], ...], around: tuple[LoopDraft, ...], depth: int) -> Draft:
        rng = self.rng
        self.budget -= 1
        kind = rng.random()
        if kind < 0.4 or depth > 3 or self.budget <= 0:
            return NodeDraft(path, around, self._name("n"))
        if kind < 0.65:
            name = self._name("l")
            limit: int | LoopLimit = rng.choice((0, 1, 2, 3, 3))
            if rng.random() < 0.4:
                self.limits[name] = rng.choice((0, 1, 2, 4))
                limit = LoopLimit(name)
            loop = LoopDraft(path, around, name, limit)
            loop.body = self._section((*path, (True, 0)), (*around, loop), depth + 1)
            return loop
        made = ListDraft(path, around, kind < 0.85)
        made.parts = [self._section((*path, (made.ordered, i)), around, depth + 1) for i in range(rng.randint(1, 3))]
        return made

    def _add_input(self, root: Draft, node: NodeDraft, partition: str, kept: list[str]) -> None:
        rng = self.rng
        scopes: list[LoopDraft | None] = [None, *node.around]
        bases: list[tuple[str, Unit | None, int]] = [("external", None, 0)]
        bases += [
            ("edge", unit, level)
            for level, scope in enumerate(scopes)
            for unit in _direct(root, scope)
            if not _contains(unit, node) and _written_before(unit, node)
        ]
        kind, producer, base = rng.choice(bases)
        name = self._name("x")
        optional = rng.random() < 0.2
        if kind == "external":
            base = 0
            free = [one for one in kept if one not in self.used]
            if free and rng.random() < 0.6:
                name = rng.choice(free)
                optional = True  # the walk that persists it may not have come first
            elif not optional or rng.random() < 0.5:
                self.request_inputs[partition].append(name)
            self.used.add(name)
        node.inputs.append(name)
        if optional:
            node.optional.add(name)
        for level in range(len(scopes) - 1, base, -1):
            backs = [unit for unit in _direct(root, scopes[level]) if not _may_follow(unit, node)]
            if backs and rng.random() < 0.7:
                self._output(rng.choice(backs), name, node.name)
        if producer is not None:
            self._output(producer, name, node.name)
        self.signals.append(name)

    def _output(self, unit: Unit, name: str, to: str, **more: object) -> bool:
        """Make the unit produce a signal; a loop passes on that of a unit in it."""
        edge = GraphEdge(to, name, **more)  # type: ignore[arg-type]
        if any((own.next_node, own.name) == (to, name) for own in unit.edges):
            return False
        if isinstance(unit, LoopDraft):
            inside = list(_units(unit.body))
            making = [one for one in inside if any(own.name == name for own in one.edges)]
            if not making:
                self._output(self.rng.choice(inside), name, EMPTY_DESTINATION)
            if not any(own.name == name for own in unit.edges) and self.rng.random() < 0.3:
                unit.accumulated.add(name)
        unit.edges.append(edge)
        self.signals.append(name)
        return True

    def _take_kept(self, walks: list[str], kept: list[str]) -> None:
        """Every persisted signal is an input of some node, of whatever walk."""
        for name in kept:
            drafts = [self.drafts[walk] for walk in walks]
            if not any(name in node.inputs for draft in drafts for node in _nodes(draft)):
                node = self.rng.choice(list(_nodes(self.rng.choice(drafts))))
                node.inputs.append(name)
                node.optional.add(name)

    def _connect(self, consumer: str, partitions: Mapping[str, list[str]]) -> Connection:
        rng = self.rng
        signal, node = f"s{consumer}", f"{consumer}.main"
        for walk in partitions["A"]:
            main = next(one for one in _nodes(self.drafts[walk]) if one.name == "A.main")
            unit = rng.choice([main, *main.around])
            self._stream_from(main, unit, signal, consumer, node)
        for walk in partitions[consumer]:
            next(one for one in _nodes(self.drafts[walk]) if one.name == node).inputs.append(signal)
        policy = rng.choice(
            (fixed(1), fixed(3), sliding(4, 2), sliding(3, 3), left_context(2, 3, first=1), left_context(3, 1))
        )
        taken = partitions[consumer]
        tags = tuple((walk, taken[i % len(taken)]) for i, walk in enumerate(partitions["A"]))
        longest = max(policy.stride, policy.first or 0) + policy.context
        return Connection("A", consumer, node, signal, policy, tags, credit=longest + rng.choice((1, 2, 100)))

    def _stream_from(self, main: NodeDraft, unit: Unit, signal: str, consumer: str, node: str) -> None:
        edge = GraphEdge(node, signal, target_partition=consumer)
        chain: list[Unit] = [main, *reversed(main.around)]
        for inner in chain[: chain.index(unit)]:
            inner.edges.append(GraphEdge(EMPTY_DESTINATION, signal))
        unit.edges.append(edge)
        if isinstance(unit, LoopDraft) and self.rng.random() < 0.4:
            unit.accumulated.add(signal)

    def _groups(self) -> list[set[str]]:
        """Nodes of one loop lie together."""
        groups: list[set[str]] = []
        for draft in self.drafts.values():
            for part in _units(draft):
                merged = {node.name for node in ([part] if isinstance(part, NodeDraft) else _nodes(part.body))}
                for group in [group for group in groups if group & merged]:
                    merged |= group
                    groups.remove(group)
                groups.append(merged)
        return groups

    def _name(self, kind: str) -> str:
        self.serial += 1
        return f"{kind}{self.serial}"


def _units(draft: Draft | None) -> Iterator[Unit]:
    if isinstance(draft, ListDraft):
        for part in draft.parts:
            yield from _units(part)
    elif isinstance(draft, NodeDraft | LoopDraft):
        yield draft


def _all_units(draft: Draft | None) -> Iterator[Unit]:
    for unit in _units(draft):
        yield unit
        if isinstance(unit, LoopDraft):
            yield from _all_units(unit.body)


def _nodes(draft: Draft | None) -> Iterator[NodeDraft]:
    return (unit for unit in _all_units(draft) if isinstance(unit, NodeDraft))


def _direct(root: Draft, scope: LoopDraft | None) -> list[Unit]:
    return list(_units(root if scope is None else scope.body))


def _contains(unit: Unit, node: NodeDraft) -> bool:
    return unit is node or unit in node.around


def _split(unit: Unit, node: NodeDraft) -> tuple[bool, int, int] | None:
    """Where their paths part: ordered?, index of the unit, index of the node."""
    for (ordered, here), (_, there) in zip(unit.path, node.path, strict=False):
        if here != there:
            return ordered, here, there
    return None


def _written_before(unit: Unit, node: NodeDraft) -> bool:
    split = _split(unit, node)
    return split is not None and split[1] < split[2]


def _may_follow(unit: Unit, node: NodeDraft) -> bool:
    split = _split(unit, node)
    return split is not None and (split[1] < split[2] or not split[0])


def _freeze(draft: Draft | None) -> GraphSection:
    match draft:
        case NodeDraft():
            return GraphNode(
                draft.name, tuple(draft.inputs), tuple(draft.edges), optional_inputs=frozenset(draft.optional)
            )
        case LoopDraft():
            accumulated = frozenset(draft.accumulated)
            return Loop(_freeze(draft.body), draft.limit, tuple(draft.edges), draft.name, accumulated)
        case ListDraft():
            parts = tuple(_freeze(part) for part in draft.parts)
            return Sequential(parts) if draft.ordered else Parallel(parts)
    raise AssertionError(draft)


def grow_program(seed: int, size: int, streams: bool = False, stop_odds: int = 0) -> Program:
    """A program of about `size` sections per walk. `streams`: with a stream-fed partition, and perhaps a second
    consumer that follows its own plan. `stop_odds`: as in `Behaviour`."""
    return Grower(seed, size, streams, stop_odds).grow()
