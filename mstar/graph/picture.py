"""A graph as plain values that turn into JSON, for whoever draws it. Start-up only; the text form is `describe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar.graph.base import (
    EMIT_TO_CLIENT,
    EMPTY_DESTINATION,
    GraphEdge,
    GraphNode,
    GraphSection,
    Loop,
    LoopLimit,
    Sequential,
    Walks,
)
from mstar.streaming.topology import PartitionTopology


@dataclass(frozen=True, slots=True)
class EdgePicture:
    """Where one output goes. `kind`: `node`, `stream` (to a node of another partition), `client` (as the modality `to`)
    or `nowhere`; `is_kept`: for later walks. `is_list`: all iterations of a loop together."""

    signal: str
    kind: str
    to: str
    is_kept: bool
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class NodePicture:
    """One call of a node; `rank`: the worker that it runs on."""

    name: str
    rank: int
    inputs: tuple[str, ...]
    outputs: tuple[EdgePicture, ...]
    kind: str = "node"


@dataclass(frozen=True, slots=True)
class GroupPicture:
    """Sections in order (`kind` is `sequential`) or side by side (`parallel`)."""

    kind: str
    parts: tuple[SectionPicture, ...]


@dataclass(frozen=True, slots=True)
class LoopPicture:
    """`limit`: a number, or the name of the request's own. `outputs`: what leaves at its end."""

    name: str
    limit: str
    section: SectionPicture
    outputs: tuple[EdgePicture, ...]
    kind: str = "loop"


SectionPicture = NodePicture | GroupPicture | LoopPicture


@dataclass(frozen=True, slots=True)
class WalkPicture:
    """A walk by name."""

    name: str
    section: SectionPicture


@dataclass(frozen=True, slots=True)
class PartitionPicture:
    """A partition with its walks. `is_stream_fed`: it starts with its first stream item."""

    name: str
    is_stream_fed: bool
    walks: tuple[WalkPicture, ...]


@dataclass(frozen=True, slots=True)
class StreamPicture:
    """A stream from one partition to a node of another."""

    signal: str
    producer: str
    consumer: str
    node: str


@dataclass(frozen=True, slots=True)
class GraphPicture:
    """All partitions of a model and the streams between them."""

    partitions: tuple[PartitionPicture, ...] = ()
    streams: tuple[StreamPicture, ...] = ()


def picture(walks: Walks, topology: PartitionTopology, placement: Mapping[str, int]) -> GraphPicture:
    """What a model declares, and where it runs."""
    partitions = tuple(
        PartitionPicture(
            partition.name,
            partition.stream_fed,
            tuple(WalkPicture(walk, _section(walks[walk], placement)) for walk in partition.walks),
        )
        for partition in topology.partitions
    )
    streams = tuple(
        StreamPicture(connection.signal, connection.producer, connection.consumer, connection.consumer_node)
        for connection in topology.connections
    )
    return GraphPicture(partitions, streams)


def _section(section: GraphSection, placement: Mapping[str, int]) -> SectionPicture:
    match section:
        case GraphNode():
            outputs = tuple(map(_edge, section.outputs))
            return NodePicture(section.name, placement[section.name], section.input_names, outputs)
        case Loop():
            limit = section.max_iters
            return LoopPicture(
                section.name,
                limit.name if isinstance(limit, LoopLimit) else str(limit),
                _section(section.section, placement),
                tuple(_edge(edge, edge.name in section.accumulated_outputs) for edge in section.outputs),
            )
        case _:
            kind = "sequential" if isinstance(section, Sequential) else "parallel"
            return GroupPicture(kind, tuple(_section(part, placement) for part in section.sections))


def _edge(edge: GraphEdge, is_list: bool = False) -> EdgePicture:
    if edge.next_node == EMIT_TO_CLIENT:
        kind, to = "client", edge.output_modality or ""
    elif edge.next_node == EMPTY_DESTINATION:
        kind, to = "nowhere", ""
    else:
        kind, to = ("node" if edge.target_partition is None else "stream"), edge.next_node
    return EdgePicture(edge.name, kind, to, edge.persist, is_list)
