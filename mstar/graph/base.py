"""Declarations of a model's dataflow graph.

Owns the frozen objects that a model writes down: nodes, edges, sections and loops. Pure data: nothing here runs, and
nothing here validates beyond one object; `mstar.graph.compile` checks a whole graph at start-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EMIT_TO_CLIENT = "__emit_to_client__"
"""Destination of an edge whose value leaves the server (a token, a waveform chunk, an image)."""

EMPTY_DESTINATION = "__empty__"
"""Destination of an edge whose value is dropped, or only kept through `GraphEdge.persist`."""


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """A value travelling from the node that lists it to `next_node`.

    `name` is the signal: the producer's output name and the consumer's input name. `persist` keeps the value for later
    walks of the same request, where an input of the same name that no edge of that walk produces is bound to it.
    `output_modality` says what an emitted value is (`"text"`, `"audio"`, ...). `target_partition` makes the edge a
    streaming edge: each value becomes one item of the stream buffer of `next_node` in that partition.
    """

    next_node: str
    name: str
    persist: bool = False
    output_modality: str | None = None
    target_partition: str | None = None


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One call of a submodule. A node name may appear in several walks of one partition, never in two partitions.

    `optional_inputs` may stay empty. `enable_async_scheduling=False` for a node that cannot bear a wasted step.
    """

    name: str
    input_names: tuple[str, ...]
    outputs: tuple[GraphEdge, ...]
    enable_async_scheduling: bool = True
    optional_inputs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Sequential:
    """Sections in written order. The order fixes which edges of an enclosing loop are loop-backs: an edge to a node
    that is not later than its producer carries the value into the next iteration."""

    sections: tuple[GraphSection, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sections without an order between them; readiness follows from the edges alone."""

    sections: tuple[GraphSection, ...]


@dataclass(frozen=True, slots=True)
class LoopLimit:
    """A number of iterations that each request brings along, by name (see `GraphRuntime.add(limits=...)`)."""

    name: str


@dataclass(frozen=True, slots=True)
class Loop:
    """Repeats `section` at most `max_iters` times, or until a member's `check_stop` ends it.

    Inputs that come from outside the loop are held for all iterations; loop-back inputs are renewed each iteration.
    `outputs` are the edges taken once, when the loop has ended, each with the last iteration's value of its signal.
    Signals in `accumulated_outputs` leave as the ordered list of all iterations' values instead.
    """

    section: GraphSection
    max_iters: int | LoopLimit
    outputs: tuple[GraphEdge, ...] = ()
    name: str = "loop"
    accumulated_outputs: frozenset[str] = frozenset()


GraphSection = GraphNode | Sequential | Parallel | Loop
Walks = Mapping[str, GraphSection]


def nodes_of(section: GraphSection) -> Sequence[GraphNode]:
    """All nodes of a section in written order."""
    match section:
        case GraphNode():
            return (section,)
        case Loop(section=inner):
            return nodes_of(inner)
        case Sequential(sections=parts) | Parallel(sections=parts):
            return tuple(node for part in parts for node in nodes_of(part))
