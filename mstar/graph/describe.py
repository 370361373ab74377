"""A graph as text, for `mstar graph MODEL`, and what the signs in it mean. Start-up only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
from mstar.streaming.topology import Connection, PartitionTopology

LEGEND = (
    ("?", "NAME?", "an input that may be missing"),
    (" -> nowhere", "-> nowhere", "no node of this walk takes it"),
    (", kept for later walks", "kept", "an input of that name takes it in a later walk of the request"),
    (" (all)", "NAME (all)", "the values of all iterations, together"),
    ("side by side", "side by side", "in any order, or at once on several workers"),
    (", not speculated on", "not speculated on", "no step of it is planned while the one before runs"),
    (", stream-fed", "stream-fed", "the first item of a stream starts it, not the request"),
    ("; credit ", "credit", "how many items the producer may be ahead"),
)
"""Signs of the text: what they are found by, how they are shown, what they mean."""


def legend(text: str) -> list[str]:
    """Lines that explain the signs which `text`, of `describe`, has."""
    used = [(shown, meaning) for sign, shown, meaning in LEGEND if sign in text]
    width = max((len(shown) for shown, _ in used), default=0)
    return [f"{shown:<{width}}  {meaning}" for shown, meaning in used]


def describe(walks: Walks, topology: PartitionTopology, placement: Mapping[str, int]) -> str:
    """Partitions with their walks (sections, loops, edges, workers), then the streams between them."""
    lines: list[str] = []
    for partition in topology.partitions:
        fed = ", stream-fed" if partition.stream_fed else ""
        lines.append(f"partition {partition.name}{fed}")
        if partition.request_inputs:
            lines.append(f"  request inputs: {', '.join(partition.request_inputs)}")
        for walk in partition.walks:
            lines.append(f"  walk {walk}")
            lines.extend(_section(walks[walk], placement, "    "))
    if topology.connections:
        lines.append("streams")
        lines.extend(_connection(connection) for connection in topology.connections)
    return "\n".join(lines) + "\n"


def _section(section: GraphSection, placement: Mapping[str, int], indent: str) -> Iterator[str]:
    match section:
        case GraphNode():
            inputs = ", ".join(name + ("?" if name in section.optional_inputs else "") for name in section.input_names)
            plain = "" if section.enable_async_scheduling else ", not speculated on"
            yield f"{indent}{section.name}({inputs}) on worker {placement[section.name]}{plain}"
            for edge in section.outputs:
                yield f"{indent}  {_edge(edge, False)}"
        case Sequential(sections=parts) | Parallel(sections=parts):
            yield f"{indent}{'in order' if isinstance(section, Sequential) else 'side by side'}"
            for part in parts:
                yield from _section(part, placement, indent + "  ")
        case Loop():
            limit = section.max_iters
            times = f"the request's {limit.name}" if isinstance(limit, LoopLimit) else str(limit)
            yield f"{indent}loop {section.name}, at most {times} times"
            yield from _section(section.section, placement, indent + "  ")
            for edge in section.outputs:
                yield f"{indent}  at its end: {_edge(edge, edge.name in section.accumulated_outputs)}"


def _edge(edge: GraphEdge, accumulated: bool) -> str:
    if edge.next_node == EMIT_TO_CLIENT:
        to = f"client as {edge.output_modality}"
    elif edge.next_node == EMPTY_DESTINATION:
        to = "nowhere"
    elif edge.target_partition is not None:
        to = f"stream to {edge.next_node} of {edge.target_partition}"
    else:
        to = edge.next_node
    kept = ", kept for later walks" if edge.persist else ""
    return f"{edge.name}{' (all)' if accumulated else ''} -> {to}{kept}"


def _connection(connection: Connection) -> str:
    policy = connection.policy
    first = "" if policy.first is None else f", first {policy.first}"
    walk = connection.consumer_walk
    tags = walk if isinstance(walk, str) else ", ".join(f"{made} -> {taken}" for made, taken in walk)
    return (
        f"  {connection.signal}: {connection.producer} -> {connection.consumer_node} of {connection.consumer}; "
        f"{policy.stride} new items per pass with {policy.context} before them{first}; walk {tags}; "
        f"credit {connection.credit}"
    )
