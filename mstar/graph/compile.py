"""Turns declared walks, a topology and a placement into the tables that runtimes run; all checks happen here.

Start-up, in every process that needs the tables (front and workers); no torch. What is wrong is said with what was
asked, what was found and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping

from mstar.graph.assemble import GraphTables, WalkAssembler, check_loops_whole
from mstar.graph.base import Walks
from mstar.graph.describe import describe
from mstar.graph.layout import WalkLayout, lay_out
from mstar.graph.partitions import node_owners, partition_of_walk, resolve_streams
from mstar.graph.program import CompiledGraph, PartitionProgram, PassMarkers, StreamProgram
from mstar.graph.protocol import GraphError, SlotRef
from mstar.graph.signals import WalkSignals, find_signals
from mstar.streaming.topology import Partition, PartitionTopology

__all__ = ["CompiledGraph", "compile_walks"]


def compile_walks(walks: Walks, topology: PartitionTopology, placement: Mapping[str, int]) -> CompiledGraph:
    """Compile a model's graph for a placement of its nodes on workers (`node → rank`).

    Rules that the declarations leave open:
    - An edge inside a `Parallel` runs forward whichever part is written first; in a `Sequential` an edge to a part that
      is not later is a loop-back of the innermost loop around both ends.
    - A value leaves a loop only through the loop's `outputs`, one loop at a time; a persisted value leaves by itself,
      at the end of the outermost loop.
    - An input has one source per loop around it. Without a source outside its loops it is bound by name to a
      persisted signal or a request input when the walk is entered.
    - A loop lies on one worker; walks may be split everywhere else.

    Raises:
        GraphError: the first thing found to be wrong.
    """
    layouts = {walk: lay_out(walk, section) for walk, section in walks.items()}
    walk_owner = partition_of_walk(layouts, topology)
    node_owner = node_owners(layouts, walk_owner)
    _check_placement(node_owner, placement)
    for layout in layouts.values():
        check_loops_whole(layout, placement)
    streams = resolve_streams(layouts, topology, walk_owner, placement)
    signals = {walk: find_signals(layout) for walk, layout in layouts.items()}
    takers = {partition.name: _takers(partition, layouts, streams, signals) for partition in topology.partitions}
    placed = {node: placement[node] for node in sorted(node_owner)}
    ranks = {
        partition.name: tuple(sorted({placed[node] for node, owner in node_owner.items() if owner == partition.name}))
        for partition in topology.partitions
    }
    owned_slots = _slots(layouts, topology, signals, ranks)
    slots = tuple(slot for slot, _ in owned_slots)
    slot_index = {slot: i for i, slot in enumerate(slots)}
    walk_names = tuple(layouts)
    partitions = tuple(
        _partition(index, partition, ranks[partition.name], takers[partition.name], streams, signals, slot_index)
        for index, partition in enumerate(topology.partitions)
    )
    tables = GraphTables(slot_index, {walk: i for i, walk in enumerate(walk_names)}, streams, placed, takers)
    programs = {
        (walk, rank): WalkAssembler(signals[walk], partition, tables, rank).build()
        for partition in partitions
        for walk in partition.walks
        for rank in partition.ranks
    }
    return CompiledGraph(
        walk_names=walk_names,
        slots=slots,
        streams=streams,
        signals=tuple(
            sorted({edge.name for layout in layouts.values() for unit in layout.units for edge in unit.edges})
        ),
        partitions=partitions,
        slot_partitions=tuple(owner for _, owner in owned_slots),
        programs=programs,
        placement=placed,
        text=describe(walks, topology, placed),
    )


def _check_placement(node_owner: Mapping[str, str], placement: Mapping[str, int]) -> None:
    if missing := sorted(set(node_owner) - set(placement)):
        raise GraphError(f"nodes {missing} are placed on no worker; add them to a node group's node_names")
    if unknown := sorted(set(placement) - set(node_owner)):
        raise GraphError(f"the placement names {unknown}, which no walk has; the nodes are {sorted(node_owner)}")
    if negative := sorted(node for node, rank in placement.items() if rank < 0):
        raise GraphError(f"nodes {negative} are placed on a negative rank")


def _takers(
    partition: Partition,
    layouts: Mapping[str, WalkLayout],
    streams: tuple[StreamProgram, ...],
    signals: Mapping[str, WalkSignals],
) -> dict[str, frozenset[str]]:
    """Which nodes take which persisted signal or request input of the partition."""
    streamed = {(stream.consumer_node, stream.signal) for stream in streams}
    kept = {name for walk in partition.walks for name in signals[walk].persisted}
    takers: dict[str, set[str]] = {}
    for walk in partition.walks:
        layout = layouts[walk]
        forward = {(edge.consumer.name, edge.signal) for edge in layout.transfers if not edge.back}
        for node in layout.nodes.values():
            for name in node.node.input_names:
                if (node.name, name) in forward or (node.name, name) in streamed:
                    continue
                takers.setdefault(name, set()).add(node.name)
                if name not in kept and name not in partition.request_inputs and name not in node.node.optional_inputs:
                    raise GraphError(
                        f"input {name!r} of {node.name!r} in walk {walk!r} has no source: no edge of the walk, no "
                        f"stream, and no walk of {partition.name!r} persists it (persisted: {sorted(kept)}); add an "
                        "edge, persist it, make it optional, or name it in Partition.request_inputs"
                    )
    for walk in partition.walks:
        if idle := sorted(set(signals[walk].persisted) - set(takers)):
            raise GraphError(
                f"walk {walk!r} persists {idle}, but no walk of {partition.name!r} has an input of that name that is "
                "not fed by an edge; drop persist or name the input like the signal"
            )
    if idle := sorted(set(partition.request_inputs) - set(takers)):
        raise GraphError(f"partition {partition.name!r} lists the request inputs {idle}, which no node takes")
    return {name: frozenset(nodes) for name, nodes in takers.items()}


def _slots(
    layouts: Mapping[str, WalkLayout],
    topology: PartitionTopology,
    signals: Mapping[str, WalkSignals],
    ranks: Mapping[str, tuple[int, ...]],
) -> list[tuple[SlotRef, int]]:
    """All slots, each with the index of its partition."""
    slots: list[tuple[SlotRef, int]] = []
    for index, partition in enumerate(topology.partitions):
        refs = [
            SlotRef(walk, node.name, name)
            for walk in partition.walks
            for node in layouts[walk].nodes.values()
            for name in node.node.input_names
        ]
        refs += [SlotRef(walk, "", name) for walk in partition.walks for name in sorted(signals[walk].persisted)]
        if partition.stream_fed and len(ranks[partition.name]) > 1:
            refs += [SlotRef(partition.name, "", _pass_name(walk)) for walk in partition.walks]
            refs.append(SlotRef(partition.name, "", _PASSES_END))
        slots += [(ref, index) for ref in refs]
    return slots


_PASSES_END = "<end of passes>"


def _pass_name(walk: str) -> str:
    return f"<pass of {walk}>"


def _renewed_by_list(signals: WalkSignals, name: str) -> bool:
    """An input of the walk by that name may be renewed by a list."""
    nodes = [node for node in signals.layout.nodes.values() if name in node.node.input_names]
    return any(signal.many for node in nodes for signal in signals.feeding(node, name))


def _partition(
    index: int,
    partition: Partition,
    ranks: tuple[int, ...],
    takers: Mapping[str, frozenset[str]],
    streams: tuple[StreamProgram, ...],
    signals: Mapping[str, WalkSignals],
    slots: Mapping[SlotRef, int],
) -> PartitionProgram:
    markers = None
    if partition.stream_fed and len(ranks) > 1:
        passes = {walk: slots[SlotRef(partition.name, "", _pass_name(walk))] for walk in partition.walks}
        markers = PassMarkers(passes, slots[SlotRef(partition.name, "", _PASSES_END)])
    coming = [stream for stream in streams if stream.consumer == partition.name]
    return PartitionProgram(
        name=partition.name,
        index=index,
        walks=partition.walks,
        stream_fed=partition.stream_fed,
        ranks=ranks,
        externals=frozenset(takers),
        streams_in=tuple(stream.index for stream in coming),
        streams_out=tuple(stream.index for stream in streams if stream.producer == partition.name),
        list_signals=frozenset(
            name for walk in partition.walks for name, signal in signals[walk].persisted.items() if signal.many
        ),
        list_inputs=frozenset(
            name for walk in partition.walks for name in takers if _renewed_by_list(signals[walk], name)
        ),
        lead_rank=coming[0].consumer_rank if partition.stream_fed else -1,
        markers=markers,
    )
