"""Builds the tables of one walk for one worker from its laid-out declaration.

Start-up only. The declaration has been checked by then, except that a loop lies on one worker, which is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar.graph.base import LoopLimit
from mstar.graph.layout import LoopUnit, NodeUnit, Unit, WalkLayout
from mstar.graph.program import (
    ROOT,
    Arrival,
    CacheOp,
    External,
    InputProgram,
    LoopProgram,
    NodeProgram,
    PartitionProgram,
    PersistOp,
    RemoteEdge,
    Route,
    StreamInput,
    StreamOp,
    StreamProgram,
    WalkProgram,
)
from mstar.graph.protocol import GraphError, ReadyKey, SlotRef
from mstar.graph.registers import InputRegisters, find_registers, num_positions
from mstar.graph.signals import Signal, WalkSignals, may_be_live


@dataclass(frozen=True, slots=True)
class GraphTables:
    """What all walks share: indices of slots and walks, and who takes which persisted signal (partition → name →
    nodes)."""

    slots: Mapping[SlotRef, int]
    walk_index: Mapping[str, int]
    streams: tuple[StreamProgram, ...]
    placement: Mapping[str, int]
    takers: Mapping[str, Mapping[str, frozenset[str]]]


def check_loops_whole(layout: WalkLayout, placement: Mapping[str, int]) -> None:
    """Raises:
    GraphError: the nodes of a loop are placed on several workers.
    """
    for loop in layout.loops:
        ranks = {node.name: placement[node.name] for node in layout.nodes.values() if loop in node.around}
        if len(set(ranks.values())) > 1:
            raise GraphError(
                f"loop {loop.name!r} of walk {layout.walk!r} is split over workers {sorted(set(ranks.values()))} "
                f"({', '.join(f'{node} on {rank}' for node, rank in sorted(ranks.items()))}); place its nodes on one"
            )


class WalkAssembler:
    """Builds one `WalkProgram`."""

    def __init__(self, signals: WalkSignals, partition: PartitionProgram, tables: GraphTables, rank: int) -> None:
        self._signals = signals
        self._layout = signals.layout
        self._partition = partition
        self._tables = tables
        self._rank = rank
        self._nodes = [node for node in self._layout.nodes.values() if tables.placement[node.name] == rank]
        self._loops = [loop for loop in self._layout.loops if self._rank_of(loop) == rank]
        self._index: dict[Unit, int] = {unit: i for i, unit in enumerate((*self._nodes, *self._loops))}
        self._caches = {
            signal: i for i, signal in enumerate(out for loop in self._loops for out in signals.of_unit[loop])
        }
        self._stream_inputs = {
            (stream.consumer_node, stream.signal): stream.index
            for stream in tables.streams
            if stream.consumer == partition.name
        }
        self._inputs = self._place_inputs()

    def build(self) -> WalkProgram:
        layout, registers = self._layout, list(self._inputs.values())
        size = sum(num_positions(found) for found in registers)
        readers, many = [0] * size, [False] * size
        for found in registers:
            holds_list = self._holds_list(found)
            for position in _positions(found):
                readers[position] = self._index[found.node]
                many[position] = holds_list
        arrivals = self._arrivals()
        return WalkProgram(
            walk=layout.walk,
            walk_index=self._tables.walk_index[layout.walk],
            partition=self._partition.name,
            nodes=tuple(self._node(node, many) for node in self._nodes),
            loops=tuple(self._loop(loop) for loop in self._loops),
            root_members=sum(self._bit(unit) for unit in self._index if unit.scope is None),
            root_loops=tuple(self._loops.index(loop) for loop in self._loops if loop.scope is None),
            num_positions=size,
            many=tuple(many),
            readers=tuple(readers),
            caches=tuple(signal.many for signal in self._caches),
            externals=tuple(
                External(found.registers[0].position, found.name, found.name in found.node.node.optional_inputs)
                for found in registers
                if found.forward is None
            ),
            arrivals=arrivals,
            all_arrivals=sum(arrival.bit for arrival in arrivals.values()),
            streams=tuple(
                stream
                for (node, name), stream in self._stream_inputs.items()
                if any(node == local.name and name in local.node.input_names for local in self._nodes)
            ),
        )

    def _place_inputs(self) -> dict[tuple[NodeUnit, str], InputRegisters]:
        inputs: dict[tuple[NodeUnit, str], InputRegisters] = {}
        free = 0
        for node in self._nodes:
            for name in node.node.input_names:
                if (node.name, name) not in self._stream_inputs:
                    found = inputs[node, name] = find_registers(self._layout, node, name, free)
                    free += num_positions(found)
        return inputs

    def _holds_list(self, found: InputRegisters) -> bool:
        if found.forward is None and found.name in self._partition.list_signals:
            return True
        return any(signal.many for signal in self._signals.feeding(found.node, found.name))

    def _takes_list(self, node: NodeUnit, name: str) -> bool:
        found = self._inputs.get((node, name))
        return found is None or self._holds_list(found)

    def _node(self, node: NodeUnit, many: list[bool]) -> NodeProgram:
        own = [found for (unit, _), found in self._inputs.items() if unit is node]
        streams = tuple(
            StreamInput(name, self._stream_inputs[node.name, name])
            for name in node.node.input_names
            if (node.name, name) in self._stream_inputs
        )
        renewed = {
            found.name: back.edge.signal
            for found in own
            for back in found.backs
            if back.edge.scope is node.scope and back.edge.producer is node
        }
        spec_need, waits = self._spec_need(node, [found for found in own if found.name not in renewed])
        return NodeProgram(
            key=ReadyKey(node.name, self._layout.walk),
            index=self._index[node],
            bit=self._bit(node),
            scope=self._scope(node),
            inputs=tuple(
                InputProgram(
                    found.name,
                    tuple(register.position for register in reversed(found.registers)),
                    many[found.registers[0].position],
                    next(
                        (
                            back.position
                            for back in found.backs
                            if back.edge.scope is node.scope and found.name not in renewed
                        ),
                        -1,
                    ),
                )
                for found in own
            ),
            streams=streams,
            need=sum(1 << found.registers[0].position for found in own),
            used=tuple(register.position for found in own for register in found.used_by_node()),
            routes=tuple(self._route(signal) for signal in self._signals.of_unit[node]),
            self_inputs=tuple(renewed),
            self_signals=tuple(dict.fromkeys(renewed.values())),
            live_externals=tuple(
                name for name, nodes in self._tables.takers[self._partition.name].items() if nodes == {node.name}
            ),
            spec_need=spec_need,
            speculates=node.scope is not None and not waits and node.node.enable_async_scheduling,
        )

    def _spec_need(self, node: NodeUnit, inputs: list[InputRegisters]) -> tuple[int, bool]:
        """Positions that hold the next iteration's other inputs already, and whether one is made in that iteration."""
        need, waits = 0, False
        for found in inputs:
            renewing = [back for back in found.backs if back.edge.scope is node.scope]
            if renewing:
                need |= 1 << renewing[0].position
            elif found.forward is not None and found.forward.scope is node.scope:
                waits = True
            else:
                need |= 1 << found.registers[0].position
        return need, waits

    def _loop(self, loop: LoopUnit) -> LoopProgram:
        inside = [unit for unit in self._index if loop in unit.around]
        nodes = [unit for unit in inside if isinstance(unit, NodeUnit)]
        loops = [unit for unit in inside if isinstance(unit, LoopUnit)]
        limit = loop.loop.max_iters
        backs = [back for found in self._inputs.values() for back in found.backs if back.edge.scope is loop]
        return LoopProgram(
            name=loop.name,
            index=self._loops.index(loop),
            bit=self._bit(loop),
            parent=self._scope(loop),
            members=sum(self._bit(unit) for unit in inside if unit.scope is loop),
            inside=sum(self._bit(unit) for unit in inside),
            nodes=tuple(self._index[node] for node in nodes),
            loops=tuple(self._loops.index(unit) for unit in loops),
            children=tuple(self._loops.index(unit) for unit in loops if unit.scope is loop),
            has_direct_node=any(node.scope is loop for node in nodes),
            max_iters=-1 if isinstance(limit, LoopLimit) else limit,
            limit=limit.name if isinstance(limit, LoopLimit) else "",
            promotes=tuple((back.position, back.register.position) for back in backs),
            drops=tuple(
                position
                for found in self._inputs.values()
                if loop in found.node.around
                for position in found.dropped_by(loop)
            ),
            outputs=tuple((self._caches[signal], self._route(signal)) for signal in self._signals.of_unit[loop]),
        )

    def _route(self, signal: Signal) -> Route:
        local, following, remotes = [], [], []
        for edge in signal.transfers:
            found = self._inputs.get((edge.consumer, edge.signal))
            if found is None:
                slot = self._tables.slots[SlotRef(self._layout.walk, edge.consumer.name, edge.signal)]
                remotes.append(RemoteEdge(self._rank_of(edge.consumer), slot))
            elif edge.back:
                following.append(next(back.position for back in found.backs if back.edge is edge))
            else:
                local.append(found.registers[0].position)
        takers = self._tables.takers[self._partition.name]
        return Route(
            key=ReadyKey(signal.origin.name, self._layout.walk),
            signal=signal.name,
            local=tuple(local),
            following=tuple(following),
            caches=tuple(CacheOp(self._caches[out], out.accumulated) for out in signal.exits),
            remotes=tuple(remotes),
            emits=tuple(signal.emits),
            streams=tuple(
                self._stream_op(signal.name, edge.next_node, edge.target_partition) for edge in signal.streams
            ),
            persists=(self._persist_op(signal.name, takers),) if signal.persisted else (),
            live_ok=may_be_live(signal, takers, self._takes_list)
            and not (signal.persisted and signal.name in self._partition.list_signals | self._partition.list_inputs),
        )

    def _stream_op(self, signal: str, node: str, partition: str | None) -> StreamOp:
        stream = next(
            stream
            for stream in self._tables.streams
            if (stream.signal, stream.consumer_node, stream.consumer) == (signal, node, partition)
        )
        return StreamOp(stream.index, self._tables.walk_index[stream.tags[self._layout.walk]], stream.consumer_rank)

    def _persist_op(self, name: str, takers: Mapping[str, frozenset[str]]) -> PersistOp:
        ranks = {self._tables.placement[node] for node in takers[name]}
        slot = self._tables.slots[SlotRef(self._layout.walk, "", name)]
        return PersistOp(
            name, self._rank in ranks, tuple(RemoteEdge(rank, slot) for rank in sorted(ranks - {self._rank}))
        )

    def _arrivals(self) -> dict[int, Arrival]:
        arriving: list[tuple[int, int, str]] = []  # (slot, position, persisted signal)
        for found in self._inputs.values():
            if found.forward is not None and self._rank_of(found.forward.producer) != self._rank:
                ref = SlotRef(self._layout.walk, found.node.name, found.name)
                arriving.append((self._tables.slots[ref], found.registers[0].position, ""))
        for name, signal in self._signals.persisted.items():
            at = {self._tables.placement[node] for node in self._tables.takers[self._partition.name][name]}
            if self._rank in at and self._rank_of(signal.origin) != self._rank:
                arriving.append((self._tables.slots[SlotRef(self._layout.walk, "", name)], -1, name))
        if self._partition.markers is not None and self._rank != self._partition.lead_rank:
            arriving.append((self._partition.markers.passes[self._layout.walk], -1, ""))
        return {slot: Arrival(1 << i, position, name) for i, (slot, position, name) in enumerate(arriving)}

    def _bit(self, unit: Unit) -> int:
        return 1 << self._index[unit]

    def _scope(self, unit: Unit) -> int:
        return ROOT if unit.scope is None else self._loops.index(unit.scope)

    def _rank_of(self, unit: Unit) -> int:
        """Where the unit runs; a loop lies on one worker."""
        if isinstance(unit, NodeUnit):
            return self._tables.placement[unit.name]
        return next(
            self._tables.placement[node.name]
            for node in self._layout.nodes.values()
            if isinstance(unit, LoopUnit) and unit in node.around
        )


def _positions(found: InputRegisters) -> list[int]:
    return [register.position for register in found.registers] + [back.position for back in found.backs]
