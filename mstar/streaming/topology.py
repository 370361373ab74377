"""Partitions and the connections between them, as a model declares them. Pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mstar.streaming.chunk_policy import ChunkPolicy


@dataclass(frozen=True, slots=True)
class Partition:
    """A set of walks with its own state machine. A stream-fed partition is started by its first stream item.

    `request_inputs` names what the request itself brings (prompt ids, media): inputs that no edge, no stream and no
    persisted signal of the partition produces must be listed here or be optional.
    """

    name: str
    walks: tuple[str, ...]
    stream_fed: bool = False
    request_inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Connection:
    """A streaming edge between two partitions.

    `signal` is the edge's name; `consumer_walk` maps the producer's walk to the walk that shall consume its items (a
    constant when the mapping is a plain string). `credit` bounds how many items a producer may be ahead.
    """

    producer: str
    consumer: str
    consumer_node: str
    signal: str
    policy: ChunkPolicy
    consumer_walk: str | tuple[tuple[str, str], ...]
    credit: int = 256


@dataclass(frozen=True, slots=True)
class PartitionTopology:
    """All partitions of a model and the streams between them."""

    partitions: tuple[Partition, ...]
    connections: tuple[Connection, ...] = ()
