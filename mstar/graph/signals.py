"""The values of a walk and where each is needed, before placement.

Start-up only. A signal is one output of a node, or of a loop at its end. A signal persisted inside a loop leaves
through the loops around it, so that only the value of the last iteration is kept and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mstar.graph.base import EMIT_TO_CLIENT, GraphEdge
from mstar.graph.layout import LoopUnit, NodeUnit, Transfer, Unit, WalkLayout
from mstar.graph.protocol import GraphError


@dataclass(eq=False, slots=True)
class Signal:
    """`origin` is the node that made the value. `many`: it is a list (an accumulated output). `exits` are the outputs
    of the loop directly around the producer that take this value at the loop's end."""

    name: str
    producer: Unit
    origin: NodeUnit
    many: bool = False
    accumulated: bool = False
    transfers: list[Transfer] = field(default_factory=list)
    emits: list[str] = field(default_factory=list)
    streams: list[GraphEdge] = field(default_factory=list)
    exits: list[Signal] = field(default_factory=list)
    persisted: bool = False


@dataclass(slots=True)
class WalkSignals:
    """The signals of one walk by producer, and its persisted ones by name."""

    layout: WalkLayout
    of_unit: dict[Unit, list[Signal]]
    persisted: dict[str, Signal]

    def feeding(self, node: NodeUnit, name: str) -> list[Signal]:
        """Signals with an edge to the input, in no order."""
        return [
            signal
            for signals in self.of_unit.values()
            for signal in signals
            for edge in signal.transfers
            if edge.consumer is node and edge.signal == name
        ]


def find_signals(layout: WalkLayout) -> WalkSignals:
    """The signals of a walk.

    Raises:
        GraphError: two signals of the walk would be persisted under one name.
    """
    found = WalkSignals(layout, {unit: [] for unit in layout.units}, {})
    for node in layout.nodes.values():
        for name in dict.fromkeys(edge.name for edge in node.edges):
            found.of_unit[node].append(_connected(layout, Signal(name, node, node)))
    for loop in sorted(layout.loops, key=lambda loop: -len(loop.around)):
        for name, source in loop.sources.items():
            inner = next(signal for signal in found.of_unit[source] if signal.name == name)
            accumulated = name in loop.loop.accumulated_outputs
            _exit(found, loop, inner, accumulated)
    persisted = [
        signal
        for unit, signals in found.of_unit.items()
        for signal in signals
        if any(edge.persist and edge.name == signal.name for edge in unit.edges)
    ]
    for signal in persisted:
        _persist(found, signal)
    return found


def _connected(layout: WalkLayout, signal: Signal) -> Signal:
    signal.transfers = [
        edge for edge in layout.transfers if edge.producer is signal.producer and edge.signal == signal.name
    ]
    own = [edge for edge in signal.producer.edges if edge.name == signal.name]
    signal.emits = [edge.output_modality or "" for edge in own if edge.next_node == EMIT_TO_CLIENT]
    signal.streams = [edge for edge in own if edge.target_partition is not None]
    return signal


def _exit(found: WalkSignals, loop: LoopUnit, inner: Signal, accumulated: bool) -> Signal:
    out = _connected(found.layout, Signal(inner.name, loop, inner.origin, inner.many or accumulated, accumulated))
    inner.exits.append(out)
    found.of_unit[loop].append(out)
    return out


def _persist(found: WalkSignals, signal: Signal) -> None:
    """Mark the signal's last value, as it leaves the outermost loop, as persisted."""
    while (scope := signal.producer.scope) is not None:
        plain = [out for out in signal.exits if not out.accumulated]
        if plain:
            signal = plain[0]
            continue
        out = Signal(signal.name, scope, signal.origin, signal.many)
        signal.exits.append(out)
        found.of_unit[scope].append(out)
        signal = out
    other = found.persisted.setdefault(signal.name, signal)
    if other is not signal:
        raise GraphError(
            f"walk {found.layout.walk!r} persists {signal.name!r} of {other.origin.name!r} (through "
            f"{other.producer.name!r}) and of {signal.origin.name!r} (through {signal.producer.name!r}); one value per "
            "name is kept, rename one or persist it once"
        )
    signal.persisted = True


def may_be_live(
    signal: Signal, takers: Mapping[str, Iterable[str]], takes_list: Callable[[NodeUnit, str], bool]
) -> bool:
    """Whether the value may stay in its node's device column. `takers` names, per persisted signal, the nodes that
    take it; `takes_list` says whether an input holds lists, which are of tensors.

    Only the node itself may read it later, and only before it runs again. The end of a loop is too late for that: a
    step speculated past a stop has overwritten the column, so a live value leaves a loop only to the client, in the
    step that made it.
    """
    if signal.streams or signal.accumulated or not all(may_be_live(out, takers, takes_list) for out in signal.exits):
        return False
    if isinstance(signal.producer, LoopUnit):
        return not (signal.transfers or signal.persisted or signal.producer.num_nodes > 1)
    if any(takes_list(edge.consumer, edge.signal) for edge in signal.transfers):
        return False
    readers = {edge.consumer.name for edge in signal.transfers}
    if signal.persisted:
        readers.update(takers.get(signal.name, ()))
    return readers <= {signal.origin.name}
