"""State of requests in a runtime: integers, bitmasks and lists of ids; never a copy of the graph."""

from __future__ import annotations

from collections.abc import Collection

from mstar.graph.program import PartitionProgram, WalkProgram
from mstar.graph.references import Value
from mstar.streaming.buffer import StreamBuffer


class RequestState:
    """One request on this worker, over all partitions."""

    __slots__ = (
        "buffers",
        "closed",
        "credited",
        "ended",
        "full",
        "gates",
        "handle",
        "made",
        "muted",
        "open_on",
        "persisted",
        "rows",
    )

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.gates = 0
        self.rows: dict[int, RowState] = {}
        """By partition."""
        self.persisted: dict[int, dict[str, Value]] = {}
        """By partition and signal."""
        self.buffers: dict[int, StreamBuffer] = {}
        """By stream: what it consumes here."""
        self.made: dict[int, int] = {}
        """By stream: how many items it produced here."""
        self.credited: dict[int, int] = {}
        self.full: set[int] = set()
        """Streams too far ahead of their consumer."""
        self.ended: set[int] = set()
        """Streams whose end it has reported."""
        self.closed: set[int] = set()
        """Partitions that run no further walk here."""
        self.muted: set[int] = set()
        """Streams whose items nobody will consume."""
        self.open_on: Collection[int] | None = None
        """Workers that know the request; None: all."""


class RowState:
    """One request in one partition. Bits of `done`, `ready`, `running`, `armed`, `stopping` are units of `program`."""

    __slots__ = (
        "active",
        "armed",
        "arrived",
        "caches",
        "done",
        "filled",
        "gates",
        "handle",
        "ids",
        "iterations",
        "limits",
        "named_limits",
        "own_gates",
        "parked",
        "partition",
        "passes",
        "program",
        "ready",
        "request",
        "running",
        "sequences",
        "stopping",
        "used_streams",
    )

    def __init__(self, request: RequestState, partition: PartitionProgram, program: WalkProgram) -> None:
        self.handle = request.handle
        self.request = request
        self.partition = partition
        self.program = program
        self.active = False
        self.gates = 0  # of the request and of this partition
        self.own_gates = 0
        self.done = 0
        self.ready = 0
        self.running = 0
        self.armed = 0
        self.stopping = 0
        self.arrived = 0
        self.filled = 0
        self.ids: list[Value] = []
        self.caches: list[Value] = []
        self.iterations: list[int] = []  # per loop, of the running iteration
        self.limits: list[int] = []  # per loop
        self.sequences: list[int] = []  # per node: its place in the ready index
        self.named_limits: dict[str, int] = {}
        self.passes = -1  # index of the pass of a stream-fed partition
        self.used_streams = 0  # bits of streams that this pass has taken a chunk of
        self.parked: list[tuple[int, list[int]]] = []  # (slot, ids) that arrived for a later walk
