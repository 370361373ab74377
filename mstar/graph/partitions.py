"""Partitions and streams of a graph, checked against its walks and resolved to workers.

Start-up only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mstar.graph.base import GraphEdge
from mstar.graph.layout import WalkLayout
from mstar.graph.program import StreamProgram
from mstar.graph.protocol import GraphError
from mstar.streaming.topology import Connection, PartitionTopology


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A streaming edge of a unit of a walk; `origin` is the node that makes the items."""

    walk: str
    unit: str
    origin: str
    edge: GraphEdge


def partition_of_walk(layouts: Mapping[str, WalkLayout], topology: PartitionTopology) -> dict[str, str]:
    """The partition of every walk.

    Raises:
        GraphError: partitions and walks do not match one to one, or a loop name is used in two partitions.
    """
    owner: dict[str, str] = {}
    names = [partition.name for partition in topology.partitions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise GraphError(f"partitions {twice} are declared twice")
    for partition in topology.partitions:
        if not partition.walks:
            raise GraphError(f"partition {partition.name!r} has no walks; list them or remove it")
        for walk in partition.walks:
            if walk not in layouts:
                raise GraphError(
                    f"partition {partition.name!r} lists the walk {walk!r}; the declared walks are {sorted(layouts)}"
                )
            if walk in owner:
                raise GraphError(f"walk {walk!r} is listed twice (in {owner[walk]!r} and {partition.name!r})")
            owner[walk] = partition.name
    if missing := sorted(set(layouts) - set(owner)):
        raise GraphError(f"walks {missing} are in no partition; list them in one of {names}")
    loops: dict[str, str] = {}
    for walk, layout in layouts.items():
        for loop in layout.loops:
            if loops.setdefault(loop.name, owner[walk]) != owner[walk]:
                raise GraphError(
                    f"loop name {loop.name!r} is used in partitions {loops[loop.name]!r} and {owner[walk]!r}; "
                    "check_stop names a loop, so give each partition its own names"
                )
    return owner


def node_owners(layouts: Mapping[str, WalkLayout], walk_owner: Mapping[str, str]) -> dict[str, str]:
    """The partition of every node.

    Raises:
        GraphError: a node appears in walks of two partitions.
    """
    owner: dict[str, str] = {}
    for walk, layout in layouts.items():
        for name in layout.nodes:
            here = walk_owner[walk]
            if owner.setdefault(name, here) != here:
                raise GraphError(
                    f"node {name!r} appears in partitions {owner[name]!r} and {here!r} (walk {walk!r}); a node belongs "
                    "to one partition, give the second its own name"
                )
    return owner


def resolve_streams(
    layouts: Mapping[str, WalkLayout],
    topology: PartitionTopology,
    walk_owner: Mapping[str, str],
    placement: Mapping[str, int],
) -> tuple[StreamProgram, ...]:
    """Every connection with its workers and tags, in declared order.

    Raises:
        GraphError: a connection and the edges, inputs, walks or partitions that it names do not fit.
    """
    sources = list(_sources(layouts))
    for source in sources:
        if not any(_feeds(connection, source, walk_owner) for connection in topology.connections):
            raise GraphError(
                f"{source.unit!r} in walk {source.walk!r} streams {source.edge.name!r} to {source.edge.next_node!r} of "
                f"partition {source.edge.target_partition!r}, and no Connection of the topology has this signal from "
                f"{walk_owner[source.walk]!r}"
            )
    streams = []
    for index, connection in enumerate(topology.connections):
        own = [source for source in sources if _feeds(connection, source, walk_owner)]
        _check_ends(connection, topology, layouts, walk_owner)
        streams.append(_resolve(index, connection, own, topology, layouts, placement))
    _check_consumers(topology, streams, sources, walk_owner)
    return tuple(streams)


def _sources(layouts: Mapping[str, WalkLayout]) -> Iterator[StreamSource]:
    for walk, layout in layouts.items():
        for unit in layout.units:
            for edge in unit.edges:
                if edge.target_partition is not None:
                    yield StreamSource(walk, unit.name, _origin(layout, unit.name, edge.name), edge)


def _origin(layout: WalkLayout, unit: str, signal: str) -> str:
    while unit not in layout.nodes:
        loop = next(loop for loop in layout.loops if loop.name == unit)
        unit = loop.sources[signal].name
    return unit


def _feeds(stream: Connection | StreamProgram, source: StreamSource, walk_owner: Mapping[str, str]) -> bool:
    """Whether the items that `source` makes are the stream's."""
    return (
        stream.signal == source.edge.name
        and stream.consumer == source.edge.target_partition
        and stream.consumer_node == source.edge.next_node
        and stream.producer == walk_owner[source.walk]
    )


def _where(connection: Connection) -> str:
    return f"connection {connection.signal!r} from {connection.producer!r} to {connection.consumer_node!r}"


def _check_ends(
    connection: Connection,
    topology: PartitionTopology,
    layouts: Mapping[str, WalkLayout],
    walk_owner: Mapping[str, str],
) -> None:
    where = _where(connection)
    names = [partition.name for partition in topology.partitions]
    for end in (connection.producer, connection.consumer):
        if end not in names:
            raise GraphError(f"{where}: there is no partition {end!r} (there are {names})")
    if connection.producer == connection.consumer:
        raise GraphError(f"{where}: a stream joins two partitions; inside one, use an edge or persist")
    taken = [
        walk
        for walk, layout in layouts.items()
        if walk_owner[walk] == connection.consumer
        and connection.consumer_node in layout.nodes
        and connection.signal in layout.nodes[connection.consumer_node].node.input_names
    ]
    if not taken:
        raise GraphError(
            f"{where}: no walk of {connection.consumer!r} has a node {connection.consumer_node!r} with the input "
            f"{connection.signal!r}"
        )
    for walk in taken:
        if any(
            edge.consumer.name == connection.consumer_node and edge.signal == connection.signal
            for edge in layouts[walk].transfers
        ):
            raise GraphError(f"{where}: in walk {walk!r} an edge feeds the same input; rename one signal")
    policy = connection.policy
    if policy.stride < 1 or policy.context < 0 or (policy.first is not None and policy.first < 1):
        raise GraphError(
            f"{where}: the chunk policy has stride {policy.stride}, context {policy.context}, first {policy.first}; "
            "chunks hold at least one new item"
        )
    longest = max(policy.stride, policy.first or 0) + policy.context
    if connection.credit <= longest:
        raise GraphError(
            f"{where}: credit is {connection.credit}, but a chunk needs up to {longest} items and one more to be known "
            f"not to be the last; raise it to at least {longest + 1}"
        )


def _resolve(
    index: int,
    connection: Connection,
    sources: list[StreamSource],
    topology: PartitionTopology,
    layouts: Mapping[str, WalkLayout],
    placement: Mapping[str, int],
) -> StreamProgram:
    where = _where(connection)
    if not sources:
        raise GraphError(
            f"{where}: no edge of {connection.producer!r} has target_partition={connection.consumer!r}, "
            f"next_node={connection.consumer_node!r} and this signal"
        )
    ranks = {source.origin: placement[source.origin] for source in sources}
    if len(set(ranks.values())) > 1:
        raise GraphError(
            f"{where}: its items are made on several workers ({ranks}), so they have no order; place them on one"
        )
    walks = next(partition.walks for partition in topology.partitions if partition.name == connection.consumer)
    tags: dict[str, str] = {}
    for source in sources:
        match connection.consumer_walk:
            case str(tag):
                tags[source.walk] = tag
            case mapping:
                tag = dict(mapping).get(source.walk)
                if tag is None:
                    raise GraphError(f"{where}: consumer_walk names no walk for items of the walk {source.walk!r}")
                tags[source.walk] = tag
        if tag not in walks:
            raise GraphError(f"{where}: consumer_walk names {tag!r}; {connection.consumer!r} has {list(walks)}")
        node = layouts[tag].nodes.get(connection.consumer_node)
        if node is None or connection.signal not in node.node.input_names:
            raise GraphError(
                f"{where}: consumer_walk names {tag!r}, which has no node {connection.consumer_node!r} with the input "
                f"{connection.signal!r}"
            )
    return StreamProgram(
        index=index,
        producer=connection.producer,
        producer_rank=next(iter(ranks.values())),
        consumer=connection.consumer,
        consumer_node=connection.consumer_node,
        consumer_rank=placement[connection.consumer_node],
        signal=connection.signal,
        policy=connection.policy,
        credit=connection.credit,
        tags=tags,
    )


def _check_consumers(
    topology: PartitionTopology,
    streams: list[StreamProgram],
    sources: list[StreamSource],
    walk_owner: Mapping[str, str],
) -> None:
    for partition in topology.partitions:
        own = [stream for stream in streams if stream.consumer == partition.name]
        producers = sorted({stream.producer for stream in own})
        if len(producers) > 1:
            raise GraphError(
                f"partition {partition.name!r} takes streams of {producers}; a consumer follows one producer, so pass "
                "one stream through the other partition"
            )
        inputs = [(stream.consumer_node, stream.signal) for stream in own]
        if twice := sorted({item for item in inputs if inputs.count(item) > 1}):
            raise GraphError(f"partition {partition.name!r} has two connections for {twice}")
        if not partition.stream_fed:
            continue
        if not own:
            raise GraphError(f"partition {partition.name!r} is stream-fed, but no Connection leads to it")
        if idle := sorted(set(partition.walks) - {tag for stream in own for tag in stream.tags.values()}):
            raise GraphError(
                f"walks {idle} of the stream-fed partition {partition.name!r} are named by no consumer_walk"
            )
        made = [
            {(source.walk, source.origin) for source in sources if _feeds(stream, source, walk_owner)} for stream in own
        ]
        alike = [(stream.policy, stream.consumer_rank, stream.tags) for stream in own]
        if any(one != made[0] for one in made) or any(one != alike[0] for one in alike):
            raise GraphError(
                f"streams {[stream.signal for stream in own]} of the stream-fed partition {partition.name!r} differ in "
                "producing node or walk, policy, consumer_walk or consuming worker; a pass takes one chunk of each, so "
                "they must keep step"
            )
