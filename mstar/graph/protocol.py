"""The contract of a graph runtime: columns in, columns out.

A runtime keeps, for the requests of one worker, which node of which walk may run next, and who receives what a node
produced. It is pure bookkeeping on integers: it moves no tensor, sends no message and reads no clock. Runs on the
worker's loop thread only. Rows are request handles; a node belongs to one partition, so (key, handle) names a row.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

NO_TENSOR = 0
"""Tensor id of an optional input that is absent."""

LIVE_COLUMN = -1
"""Tensor id of a value that lives in the producing node's device column, one entry per handle (a sampled token).
Never counted, never sent: only an edge or a persisted signal back to the same node, or an emit, may carry it."""


class ReadyKey(NamedTuple):
    """What a step runs: a node in a walk. Node names are unique over partitions."""

    node: str
    walk: str


class Gate(enum.IntFlag):
    """Reasons why a row may not be scheduled; a row is in the ready index only while none is set."""

    FAILED = 1
    HELD = 2
    REMOVING = 4
    STREAM_FULL = 8


class SlotRef(NamedTuple):
    """An edge slot, where a value from another worker goes: an input, or with an empty `node` the signal `name` that
    `walk` persists.

    `CompiledGraph.slots` lists them, in the same order on every worker; the index is the slot's id.
    """

    walk: str
    node: str
    name: str


class Cols(NamedTuple):
    """Edge values that arrived from elsewhere, one entry per value.

    `slots` index `CompiledGraph.slots`. `counts[i]` values of row i follow each other in `ids`: 1, except
    for an accumulated loop output, or a marker between the workers of a stream-fed partition, which has none. An id
    `NO_TENSOR` says that the producer made no value.
    """

    handles: Sequence[int]
    slots: Sequence[int]
    ids: Sequence[int]
    counts: Sequence[int] | None = None


class TakenRows(NamedTuple):
    """Rows handed to a step, with the tensor ids of their inputs.

    `ids[input_name][i]` is the id of row i: `NO_TENSOR` when absent, `LIVE_COLUMN` for a live value. Inputs that hold
    several values per row (a stream chunk, an accumulated output) are in `lists[input_name][i]` instead.
    `iterations[i]` counts from 0 in the innermost loop around the node (0 outside a loop); for a stream-fed walk
    outside a loop it counts passes. `finals[i]` is true for a pass that consumes the last chunk of its streams.
    A stream input whose stream has no item left is an empty list.
    """

    key: ReadyKey
    rows: list[int]
    ids: Mapping[str, Sequence[int]]
    lists: Mapping[str, Sequence[Sequence[int]]]
    iterations: Sequence[int]
    finals: Sequence[bool]


class SpecTarget(NamedTuple):
    """Rows that become ready for `key` if the step that runs now completes without a stop or a failure."""

    key: ReadyKey
    rows: list[int]


class SpecTaken(NamedTuple):
    """An armed speculation. Inputs produced by the step in flight have the id `LIVE_COLUMN`; a target whose other
    in-flight inputs are tensors is never offered."""

    spec_id: int
    taken: TakenRows


class EdgeColumns(NamedTuple):
    """Values for one peer worker, parallel lists."""

    handles: list[int]
    slots: list[int]
    ids: list[int]
    counts: list[int]


class StreamColumns(NamedTuple):
    """Stream items for one peer worker (or for this one), parallel lists; `edges` index `CompiledGraph.streams`,
    `tags` index `CompiledGraph.walk_names` (the walk that shall consume the item)."""

    handles: list[int]
    edges: list[int]
    ids: list[int]
    tags: list[int]


class EmitColumns(NamedTuple):
    """Emitted values of one (key, signal): `ids[i]` is a tensor id, or `LIVE_COLUMN` when the value rides inline."""

    key: ReadyKey
    signal: str
    modality: str
    handles: list[int]
    ids: list[int]


@dataclass(slots=True)
class Routed:
    """What one step's completions lead to; `complete` appends, the worker's outbox reads it once per step.

    Every tensor id in `edges`, `streams` and `emits` (not `LIVE_COLUMN`, not `NO_TENSOR`) carries one reference,
    already retained, that belongs to the outbox from then on: it releases it when the value is sent and acknowledged.
    Items of a stream that this worker consumes itself never appear in `streams`: they are in their buffer already.
    """

    emits: list[EmitColumns] = field(default_factory=list)
    edges: dict[int, EdgeColumns] = field(default_factory=dict)
    streams: dict[int, StreamColumns] = field(default_factory=dict)
    stream_ends: dict[int, tuple[list[int], list[int], list[int]]] = field(default_factory=dict)
    """peer → (handles, edges, totals): this producer makes no further item."""
    credits: dict[int, tuple[list[int], list[int], list[int]]] = field(default_factory=dict)
    """peer → (handles, edges, counts): items of a stream that a pass of this worker consumed for good."""
    walk_done: list[tuple[int, str]] = field(default_factory=list)
    """(handle, partition) whose local part of the current walk has ended (for a stream-fed partition: for good)."""
    freed: list[int] = field(default_factory=list)
    """Tensor ids whose last reference went."""


class TensorBooks(Protocol):
    """Reference counts of the tensors of this worker. An id starts at zero references when it is put."""

    def retain(self, ids: Sequence[int]) -> None: ...
    def release(self, ids: Sequence[int]) -> list[int]:
        """Drop one reference each; returns the ids that have none left."""
        ...


class GraphRuntime(Protocol):
    """See the module docstring. Every call covers a whole batch; an error in an argument raises `GraphError` and
    changes nothing."""

    def add(
        self,
        handle: int,
        partition: str,
        walk: str | None,
        limits: Mapping[str, int],
        open_on: Collection[int] | None = None,
    ) -> None:
        """Start `partition` of a request. `walk=None`: a stream-fed partition whose first item's tag names the walk.
        `limits` resolves the `LoopLimit`s of the partition's walks (other names are ignored); those of the walk that
        is entered must be among them, of every walk in a stream-fed partition. A loop with limit 0 is skipped: its end
        follows at once, its outputs are absent (an accumulated one is an empty list). `open_on`: workers on which the
        request is open, with all nodes of the walks that it will run; signals kept for others are not sent. None: all
        workers."""
        ...

    def remove(self, handle: int) -> list[int]:
        """Forget a request in all partitions; no row of it may be in a step. Returns the freed tensor ids."""
        ...

    def knows(self, handle: int) -> bool:
        """Something of the request is in here: it has been added, or has a signal bound."""
        ...

    def set_walk(self, handle: int, partition: str, walk: str) -> None:
        """Enter the next walk; the partition must be idle. Persisted signals bind to its external inputs by name.
        A worker without a node of that walk reports it done at once (through `collect`)."""
        ...

    def set_limits(self, handle: int, partition: str, limits: Mapping[str, int]) -> None:
        """Set or change loop limits before the loop that uses them starts; `set_walk` raises `GraphError` for a walk
        with a limit that nobody has set."""
        ...

    def partition_idle(self, handle: int, partition: str) -> bool:
        """True between walks: no walk is active here and no row of it is armed."""
        ...

    def end_streams(self, handle: int, partition: str, routed: Routed) -> None:
        """The plan has no further walk for `partition` (or the request never uses it). Ends the streams it produces
        here, with their totals; drops and credits what its input streams hold or still bring; a producer on this
        worker drops items for it. Call it on every worker of the partition. A stream-fed partition that ends by itself
        needs no call; a second call changes nothing."""
        ...

    def collect(self, routed: Routed) -> None:
        """Move into `routed` what happened outside `complete`: ids freed by a late edge or a walk change, a walk that
        ended without a step, credits. Once per tick, before the outbox reads `routed`; `complete` does it as well."""
        ...

    def gate(self, handles: Sequence[int], bits: Gate, on: bool, partition: str | None = None) -> None:
        """Set or clear bits, for all partitions of the handles (also ones added later) or for one."""
        ...

    def ready_behind(self, handle: int, gate: Gate) -> bool:
        """Something of the request would be ready if this gate, and no other, were lifted. False for a request that is
        unknown here."""
        ...

    def ingest(self, block: Cols) -> list[int]:
        """Deliver values. Returns the indices refused because the request or its partition is unknown here (not yet
        added): the caller parks them. Values for a later walk of a known partition wait inside the runtime."""
        ...

    def persist(self, handle: int, partition: str, name: str, tensor_id: int) -> None:
        """Bind a request input (prompt ids, media) as a persisted signal; external inputs of that name take it, also
        those of the current walk whose node has not been taken. May precede `add`."""
        ...

    def unpersist(self, handle: int, partition: str, name: str) -> list[int]: ...

    def stream_put(
        self, handles: Sequence[int], edges: Sequence[int], ids: Sequence[int], tags: Sequence[int]
    ) -> list[int]:
        """Items arrived. Returns the indices refused because the handle is unknown here: the caller parks them."""
        ...

    def stream_end(self, handle: int, edge: int, total: int) -> None:
        """No item after the first `total`; may arrive before they do. An unknown handle raises `GraphError`."""
        ...

    def stream_credit(self, handles: Sequence[int], edges: Sequence[int], counts: Sequence[int]) -> None:
        """Consumers freed room: lifts `STREAM_FULL` of producers (set by the runtime itself when items ahead reach the
        connection's credit)."""
        ...

    def ready_keys(self) -> list[ReadyKey]:
        """Keys with at least one ready row, the key of the oldest row first. Cost: the number of keys, not of rows."""
        ...

    def peek(self, key: ReadyKey, limit: int) -> list[int]: ...
    def take(self, key: ReadyKey, rows: Sequence[int]) -> TakenRows: ...
    def give_back(self, key: ReadyKey, rows: Sequence[int]) -> None:
        """Rows return to the front of the key's queue in their old order, stream chunks to their buffers."""
        ...

    def carriable(self, key: ReadyKey, rows: Sequence[int]) -> list[int]:
        """Rows of a running (key, rows) that may go on with the run they are in, because their step computes only a
        part of it: those that no gate holds. They stay in the step; nothing changes here."""
        ...

    def speculate_node(self, key: ReadyKey, rows: Sequence[int]) -> list[SpecTarget]:
        """Rows of a running (key, rows) that would go on inside the same walk; never past an end the host knows
        (loop limits), never a disabled pair, never a gated row. Whether a node's loop-back is live is learned from its
        last completion, so the first step of a key after start-up is not speculated on."""
        ...

    def spec_prepare(self, key: ReadyKey, rows: Sequence[int]) -> SpecTaken:
        """Arm rows that `speculate_node` offered. Their stream chunks are taken."""
        ...

    def spec_going(self, spec_id: int) -> list[int]:
        """After the routing of the step before: the armed rows whose loop goes on, which are those that may be kept (a
        stop of an outer loop leaves the inner one running)."""
        ...

    def spec_settle(self, spec_id: int, keep: Sequence[int]) -> None:
        """Exactly once per speculation: after the routing of the step before it (rows not kept are wasted: their loop
        has ended or they failed), or with `keep=()` and nothing routed yet when the step is abandoned."""
        ...

    def stop_loops(self, rows: Sequence[int], loops: Sequence[str]) -> None:
        """The loop `loops[i]` of row i ends with the iteration whose completion is reported next. A loop that has ended
        already is left alone."""
        ...

    def complete(self, key: ReadyKey, rows: Sequence[int], ids: Mapping[str, Sequence[int]], routed: Routed) -> None:
        """Rows of a step finished. `ids[signal][i]`: tensor id of output `signal` of row i (`LIVE_COLUMN` if live,
        `NO_TENSOR` if the node made none; a missing signal was made for no row). A second completion of the same row
        raises `GraphError`. The outputs of a row that `fail` named meanwhile are freed and lead nowhere."""
        ...

    def fail(self, rows: Sequence[int]) -> None:
        """Rows in a step failed: gate FAILED, no step holds a row of their handles any more; they await `remove`."""
        ...


class GraphError(Exception):
    """A graph declaration or a call that breaks the contract."""
