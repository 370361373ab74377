"""A walk laid out for compilation: its nodes and loops, their written order, and what each edge means.

Start-up only. Checks everything that can be said of one walk without knowing the placement or the other walks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

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
)
from mstar.graph.protocol import GraphError

_NAMES_RESERVED = (EMIT_TO_CLIENT, EMPTY_DESTINATION, "")


@dataclass(eq=False, slots=True)
class Unit:
    """A node or a loop at its place in the walk. `path` has, per enclosing section, whether that section orders its
    parts, and the part's index. `around` are the loops around it, outermost first."""

    name: str
    path: tuple[tuple[bool, int], ...]
    around: tuple[LoopUnit, ...]
    edges: tuple[GraphEdge, ...]

    @property
    def scope(self) -> LoopUnit | None:
        """The loop directly around it."""
        return self.around[-1] if self.around else None


@dataclass(eq=False, slots=True)
class NodeUnit(Unit):
    """A node; its edges are its outputs."""

    node: GraphNode


@dataclass(eq=False, slots=True)
class LoopUnit(Unit):
    """A loop; its edges are what leaves at its end. `num_nodes`: nodes in it, those of loops inside included."""

    loop: Loop
    sources: dict[str, Unit] = field(default_factory=dict)
    """Producer, directly in this loop, of each signal of its outputs."""
    num_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """An edge between two units of the walk. `scope` is the loop that repeats both ends (None: the walk);
    `back` says that the value is for the scope's next iteration."""

    producer: Unit
    signal: str
    consumer: NodeUnit
    scope: LoopUnit | None
    back: bool


@dataclass(eq=False, slots=True)
class WalkLayout:
    """A checked walk. Units are in written order."""

    walk: str
    nodes: dict[str, NodeUnit]
    loops: list[LoopUnit]
    transfers: list[Transfer]

    @property
    def units(self) -> Iterator[Unit]:
        yield from self.nodes.values()
        yield from self.loops

    def directly_in(self, scope: LoopUnit | None) -> list[Unit]:
        return [unit for unit in self.units if unit.scope is scope]


def lay_out(walk: str, section: GraphSection) -> WalkLayout:
    """Checks and lays out one walk.

    Raises:
        GraphError: names clash, an edge leads nowhere or out of a loop, or the written order cannot be run.
    """
    layout = WalkLayout(walk, {}, [], [])
    _place(layout, section, (), ())
    if not layout.nodes:
        raise GraphError(f"walk {walk!r} has no node; a walk runs at least one")
    for loop in layout.loops:
        _find_sources(layout, loop)
    for unit in layout.units:
        layout.transfers.extend(_transfers(layout, unit))
    _check_single_sources(layout)
    _check_order(layout)
    return layout


def _place(
    layout: WalkLayout, section: GraphSection, path: tuple[tuple[bool, int], ...], around: tuple[LoopUnit, ...]
) -> None:
    match section:
        case GraphNode():
            _check_node(layout, section)
            layout.nodes[section.name] = NodeUnit(section.name, path, around, section.outputs, section)
        case Sequential(sections=parts) | Parallel(sections=parts):
            ordered = isinstance(section, Sequential)
            for index, part in enumerate(parts):
                _place(layout, part, (*path, (ordered, index)), around)
        case Loop():
            _check_loop(layout, section)
            unit = LoopUnit(section.name, path, around, section.outputs, section)
            layout.loops.append(unit)
            _place(layout, section.section, (*path, (True, 0)), (*around, unit))
            unit.num_nodes = sum(unit in node.around for node in layout.nodes.values())
            if not unit.num_nodes:
                raise GraphError(f"loop {section.name!r} of walk {layout.walk!r} has no node; give it one or remove it")
        case _:
            raise GraphError(
                f"walk {layout.walk!r} holds a {type(section).__name__}; a section is a GraphNode, Sequential, "
                "Parallel or Loop"
            )


def _check_node(layout: WalkLayout, node: GraphNode) -> None:
    where = f"node {node.name!r} of walk {layout.walk!r}"
    if node.name in _NAMES_RESERVED:
        raise GraphError(f"{where}: the name is reserved; choose another")
    if node.name in layout.nodes:
        raise GraphError(
            f"{where} appears twice; a node runs once per iteration of a walk, use a Loop or a second node"
        )
    if twice := _repeated(node.input_names):
        raise GraphError(f"{where} lists the input {twice!r} twice in input_names")
    if unknown := sorted(node.optional_inputs - set(node.input_names)):
        raise GraphError(f"{where}: optional_inputs has {unknown}, which input_names {list(node.input_names)} lacks")
    _check_edges(where, node.outputs)


def _check_loop(layout: WalkLayout, loop: Loop) -> None:
    where = f"loop {loop.name!r} of walk {layout.walk!r}"
    if not loop.name:
        raise GraphError(f"a loop of walk {layout.walk!r} has an empty name")
    if any(loop.name == other.name for other in layout.loops):
        raise GraphError(f"{where}: two loops of the walk have this name, and check_stop could not tell them apart")
    if isinstance(loop.max_iters, LoopLimit):
        if not loop.max_iters.name:
            raise GraphError(f"{where}: its LoopLimit has an empty name")
    elif loop.max_iters < 0:
        raise GraphError(f"{where}: max_iters is {loop.max_iters}; it must be 0 or more")
    if stray := sorted(loop.accumulated_outputs - {edge.name for edge in loop.outputs}):
        raise GraphError(f"{where}: accumulated_outputs has {stray}, which no edge of outputs carries")
    _check_edges(where, loop.outputs)


def _check_edges(where: str, edges: tuple[GraphEdge, ...]) -> None:
    if twice := _repeated((edge.next_node, edge.name, edge.target_partition) for edge in edges):
        raise GraphError(f"{where} has two edges {twice}; one is enough")
    for edge in edges:
        if not edge.name:
            raise GraphError(f"{where} has an edge to {edge.next_node!r} without a signal name")
        if edge.next_node == EMIT_TO_CLIENT and not edge.output_modality:
            raise GraphError(
                f"{where} emits {edge.name!r} without output_modality; say what it is (text, audio, image)"
            )
        if edge.target_partition is not None and edge.next_node in _NAMES_RESERVED:
            raise GraphError(f"{where}: the streaming edge {edge.name!r} needs a node of {edge.target_partition!r}")


def _find_sources(layout: WalkLayout, loop: LoopUnit) -> None:
    """Who produces, directly in the loop, each signal that leaves at its end."""
    where = f"loop {loop.name!r} of walk {layout.walk!r}"
    inside = layout.directly_in(loop)
    for edge in loop.edges:
        producers = [unit for unit in inside if any(own.name == edge.name for own in unit.edges)]
        if not producers:
            known = sorted({own.name for unit in inside for own in unit.edges})
            raise GraphError(
                f"{where} outputs {edge.name!r}, which nothing directly in it produces (it has {known}); "
                "an inner loop must list the signal in its own outputs"
            )
        if len(producers) > 1:
            names = sorted(unit.name for unit in producers)
            raise GraphError(
                f"{where} outputs {edge.name!r}, which {names} all produce; give the signals distinct names"
            )
        loop.sources[edge.name] = producers[0]


def _transfers(layout: WalkLayout, unit: Unit) -> Iterator[Transfer]:
    for edge in unit.edges:
        if edge.target_partition is not None or edge.next_node in _NAMES_RESERVED:
            continue
        where = f"edge {edge.name!r} of {unit.name!r} in walk {layout.walk!r}"
        consumer = layout.nodes.get(edge.next_node)
        if consumer is None:
            raise GraphError(
                f"{where} goes to {edge.next_node!r}, which is no node of this walk (it has {sorted(layout.nodes)}); "
                "use persist for a later walk, target_partition for another partition"
            )
        if edge.name not in consumer.node.input_names:
            raise GraphError(
                f"{where} goes to {edge.next_node!r}, whose inputs are {list(consumer.node.input_names)}; "
                "an edge is named like the input it feeds"
            )
        scope = unit.scope
        if scope is not None and scope not in consumer.around:
            raise GraphError(
                f"{where} leaves the loop {scope.name!r} for {edge.next_node!r}; list it in that loop's outputs"
            )
        back = not _may_follow(unit, consumer)
        if back and scope is None:
            raise GraphError(
                f"{where} goes back to {edge.next_node!r}, which is not written after it, and no loop is around both; "
                "wrap them in a Loop or reorder the section"
            )
        yield Transfer(unit, edge.name, consumer, scope, back)


def _may_follow(producer: Unit, consumer: Unit) -> bool:
    """Whether the consumer is later in the same iteration: written after it, or beside it in a Parallel."""
    for (ordered, here), (_, there) in zip(producer.path, consumer.path, strict=False):
        if here != there:
            return there > here or not ordered
    return False


def _check_single_sources(layout: WalkLayout) -> None:
    """Each input has at most one source per scope, and only the outermost may renew it within an iteration."""
    for node in layout.nodes.values():
        for name in node.node.input_names:
            where = f"input {name!r} of {node.name!r} in walk {layout.walk!r}"
            for outer, inner in pairwise(sources_of(layout, node, name)):
                if outer.scope is inner.scope:
                    raise GraphError(
                        f"{where} is fed by {outer.producer.name!r} and by {inner.producer.name!r} in the same "
                        "iteration; rename one signal"
                    )
                if not inner.back:
                    raise GraphError(
                        f"{where} is fed by {outer.producer.name!r} from outside the loop {_name(inner.scope)!r} and "
                        f"again by {inner.producer.name!r} in each iteration; rename one signal"
                    )


def sources_of(layout: WalkLayout, node: NodeUnit, name: str) -> list[Transfer]:
    """Edges that feed an input, the outermost scope first."""
    found = [edge for edge in layout.transfers if edge.consumer is node and edge.signal == name]
    return sorted(found, key=lambda edge: -1 if edge.scope is None else node.around.index(edge.scope))


def _check_order(layout: WalkLayout) -> None:
    """Within one iteration of a scope, no unit waits for itself."""
    for scope in (None, *layout.loops):
        waits: dict[Unit, set[Unit]] = {unit: set() for unit in layout.directly_in(scope)}
        for edge in layout.transfers:
            if edge.scope is scope and not edge.back:
                waits[_unit_in(scope, edge.consumer)].add(edge.producer)
        while free := [unit for unit, on in waits.items() if not on]:
            for unit in free:
                del waits[unit]
            for on in waits.values():
                on.difference_update(free)
        if waits:
            raise GraphError(
                f"{sorted(unit.name for unit in waits)} in walk {layout.walk!r} wait for each other within one "
                "iteration; put them in a Sequential inside a Loop, where an edge back is for the next iteration"
            )


def _unit_in(scope: LoopUnit | None, node: NodeUnit) -> Unit:
    """The unit directly in `scope` that is or contains the node."""
    depth = 0 if scope is None else node.around.index(scope) + 1
    return node.around[depth] if depth < len(node.around) else node


def _name(loop: LoopUnit | None) -> str:
    return "" if loop is None else loop.name


def _repeated(items: Iterator[object] | tuple[object, ...]) -> object | None:
    return next((item for item, count in Counter(items).items() if count > 1), None)
