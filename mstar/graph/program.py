"""Compiled tables of a dataflow graph: what a runtime runs, in integers and bitmasks.

Immutable and built once, at start-up, by `mstar.graph.compile`; every process builds the same tables from the same
declarations. Nothing here decides anything.

Words. A *unit* is a node or a loop of a walk that is placed on this worker; each has a bit in the masks `done`,
`ready`, `running`. A *scope* is what a unit lies in directly: a loop index, or `ROOT`. A *position* is a place in a
row's list of values: one per register of an input, and one per loop-back for the value of the coming iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mstar.graph.protocol import ReadyKey, SlotRef
from mstar.streaming.chunk_policy import ChunkPolicy

ROOT = -1
"""Scope of units outside every loop."""


class RemoteEdge(NamedTuple):
    """A value goes to `slot` (an index into `CompiledGraph.slots`) of the worker `peer`."""

    peer: int
    slot: int


class StreamOp(NamedTuple):
    """A value becomes an item of `CompiledGraph.streams[edge]`, to be consumed by walk `tag` on worker `peer`."""

    edge: int
    tag: int
    peer: int


class PersistOp(NamedTuple):
    """A value is kept under `signal` on this worker (`local`) and on the workers of `remotes`."""

    signal: str
    local: bool
    remotes: tuple[RemoteEdge, ...]


class CacheOp(NamedTuple):
    """A value is noted for the end of the loop around its producer: appended, or in place of the one before."""

    cache: int
    accumulate: bool


@dataclass(frozen=True, slots=True)
class Route:
    """Where the values of one output signal of a unit go.

    `local` are positions of inputs in the same iteration, `following` positions for the next one. `live_ok`: the value
    may be `LIVE_COLUMN`, because no one but the node that made it reads it again.
    """

    key: ReadyKey
    """The node that made the value."""
    signal: str
    local: tuple[int, ...] = ()
    following: tuple[int, ...] = ()
    caches: tuple[CacheOp, ...] = ()
    remotes: tuple[RemoteEdge, ...] = ()
    emits: tuple[str, ...] = ()
    """Modality of each edge to the client."""
    streams: tuple[StreamOp, ...] = ()
    persists: tuple[PersistOp, ...] = ()
    live_ok: bool = False


class InputProgram(NamedTuple):
    """An input of a node: the registers it is read from, the first filled one wins. `many`: it holds a list. `coming`
    is where its value for the next iteration waits, if another unit makes it (-1: nowhere)."""

    name: str
    positions: tuple[int, ...]
    many: bool
    coming: int


class StreamInput(NamedTuple):
    """An input that takes a chunk of `CompiledGraph.streams[edge]` each time its node runs."""

    name: str
    edge: int


@dataclass(frozen=True, slots=True)
class NodeProgram:
    """A node of a walk on this worker."""

    key: ReadyKey
    index: int
    bit: int
    scope: int
    inputs: tuple[InputProgram, ...]
    streams: tuple[StreamInput, ...]
    need: int
    """Positions that must be filled before the node can run."""
    used: tuple[int, ...]
    """Positions whose value is used up when the node completes; the others are held for a loop around it."""
    routes: tuple[Route, ...]
    self_inputs: tuple[str, ...]
    """Inputs renewed each iteration from an output of the node itself, in the loop directly around it."""
    self_signals: tuple[str, ...]
    """The outputs that renew them."""
    live_externals: tuple[str, ...]
    """Persisted signals that may be bound to a live value of this node."""
    spec_need: int
    """Positions that must be filled for the next iteration to run straight after this one, besides `self_inputs`."""
    speculates: bool
    """The next iteration needs nothing of the step in flight but live values."""


@dataclass(frozen=True, slots=True)
class LoopProgram:
    """A loop of a walk. All its nodes are on this worker."""

    name: str
    index: int
    bit: int
    parent: int
    members: int
    """Bits of the units directly in it."""
    inside: int
    """Bits of all units in it, nested ones included."""
    nodes: tuple[int, ...]
    """Indices of all nodes in it, nested ones included."""
    loops: tuple[int, ...]
    """Indices of all loops in it."""
    children: tuple[int, ...]
    """Indices of the loops directly in it."""
    has_direct_node: bool
    max_iters: int
    """Largest number of iterations; -1: the request's limit called `limit`."""
    limit: str
    promotes: tuple[tuple[int, int], ...]
    """(from, to) positions of its loop-backs."""
    drops: tuple[int, ...]
    """Positions to empty when it ends: inputs held for it, and loop-backs that no iteration will take."""
    outputs: tuple[tuple[int, Route], ...]
    """(cache, route) of each value that leaves at its end."""


class External(NamedTuple):
    """A position bound to the persisted signal `name` when the walk is entered; an optional one may stay absent."""

    position: int
    name: str
    optional: bool


class Arrival(NamedTuple):
    """A value that another worker sends once per walk: for `position`, or (-1) for the persisted signal `signal`, or
    neither (a marker)."""

    bit: int
    position: int
    signal: str


@dataclass(frozen=True, slots=True)
class WalkProgram:
    """One walk as one worker sees it. Without a unit here it only waits for its arrivals."""

    walk: str
    walk_index: int
    partition: str
    nodes: tuple[NodeProgram, ...]
    loops: tuple[LoopProgram, ...]
    root_members: int
    root_loops: tuple[int, ...]
    num_positions: int
    many: tuple[bool, ...]
    """Per position: it holds a list."""
    readers: tuple[int, ...]
    """Per position: index of the node that reads it."""
    caches: tuple[bool, ...]
    """Per cache: it holds a list."""
    externals: tuple[External, ...]
    arrivals: Mapping[int, Arrival]
    """By index into `CompiledGraph.slots`."""
    all_arrivals: int
    streams: tuple[int, ...]
    """Streams whose consumer is a node of this walk on this worker."""


@dataclass(frozen=True, slots=True)
class StreamProgram:
    """A connection, resolved. `tags` maps the producer's walks to the walks that consume their items."""

    index: int
    producer: str
    producer_rank: int
    consumer: str
    consumer_node: str
    consumer_rank: int
    signal: str
    policy: ChunkPolicy
    credit: int
    tags: Mapping[str, str]


class PassMarkers(NamedTuple):
    """Slots by which the worker where the streams of a partition arrive tells its other workers that a pass of a walk
    has begun (`passes`, by walk), and that there will be no further one (`end`)."""

    passes: Mapping[str, int]
    end: int


@dataclass(frozen=True, slots=True)
class PartitionProgram:
    """A partition, resolved."""

    name: str
    index: int
    walks: tuple[str, ...]
    stream_fed: bool
    ranks: tuple[int, ...]
    externals: frozenset[str]
    """Names that some walk takes as a persisted signal."""
    streams_in: tuple[int, ...]
    streams_out: tuple[int, ...]
    list_signals: frozenset[str]
    """Persisted signals that hold a list."""
    list_inputs: frozenset[str]
    """Names of persisted signals that some input takes as the first of values of which the later ones are lists."""
    lead_rank: int
    """Stream-fed: the worker where the streams arrive, which starts the passes; otherwise -1."""
    markers: PassMarkers | None = None


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """All tables. The same on every worker."""

    walk_names: tuple[str, ...]
    slots: tuple[SlotRef, ...]
    streams: tuple[StreamProgram, ...]
    signals: tuple[str, ...]
    partitions: tuple[PartitionProgram, ...]
    slot_partitions: tuple[int, ...]
    """Per slot, the index of its partition."""
    programs: Mapping[tuple[str, int], WalkProgram]
    placement: Mapping[str, int]
    text: str = field(repr=False)

    def ranks_of_partition(self, name: str) -> tuple[int, ...]:
        """Workers with a node of the partition, ascending. Each takes part in every walk of it."""
        return self.partition(name).ranks

    def partition(self, name: str) -> PartitionProgram:
        for partition in self.partitions:
            if partition.name == name:
                return partition
        raise KeyError(name)

    def nodes_on(self, rank: int) -> tuple[str, ...]:
        return tuple(sorted(node for node, placed in self.placement.items() if placed == rank))

    def keys_on(self, rank: int) -> tuple[ReadyKey, ...]:
        """What this worker can run: its nodes in each of their walks."""
        return tuple(node.key for (_, at), program in self.programs.items() if at == rank for node in program.nodes)

    def keys_everywhere(self) -> tuple[ReadyKey, ...]:
        return tuple(node.key for program in self.programs.values() for node in program.nodes)

    def stored_signals(self, rank: int) -> dict[str, frozenset[str]]:
        """By node of this worker: outputs that someone else than the node itself or the client receives, so that they
        must be tensors even where they could stay in the node's live column."""
        stored: dict[str, set[str]] = {}
        for (_, at), program in self.programs.items():
            if at == rank:
                for node in program.nodes:
                    names = {route.signal for route in node.routes if not route.live_ok}
                    stored.setdefault(node.key.node, set()).update(names)
        return {node: frozenset(names) for node, names in stored.items()}

    def loops_around(self, key: ReadyKey) -> tuple[str, ...]:
        """Names of the loops around a node in a walk, innermost first.

        Raises:
            KeyError: the walk has no such node.
        """
        program = self.programs[key.walk, self.placement[key.node]]
        for node in program.nodes:
            if node.key == key:
                names, scope = [], node.scope
                while scope != ROOT:
                    names.append(program.loops[scope].name)
                    scope = program.loops[scope].parent
                return tuple(names)
        raise KeyError(key)

    def describe(self) -> str:
        """Walks, loops, edges and placement, as text."""
        return self.text
