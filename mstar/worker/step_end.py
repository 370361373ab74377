"""`StepEnd`: what the end of a step means for its rows. Decided when its host rows can be read, told to the graph when
the step is routed.

Runs on the worker's loop thread, in the stages `check_stop` and `route`. Sends nothing, and frees nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from mstar.engine.engine import Engine
from mstar.engine.execution import Step, StepPart
from mstar.engine.submodule import StopDecision
from mstar.graph.protocol import GraphError, GraphRuntime, Routed
from mstar.worker.grammars.constrained_rows import ConstrainedRows
from mstar.worker.walks import WalkRunner

log = logging.getLogger(__name__)


class StepEnd:
    """Keeps what was decided on one step until that step is routed."""

    def __init__(self, graph: GraphRuntime, engine: Engine, walks: WalkRunner, constrained: ConstrainedRows) -> None:
        self._graph = graph
        self._engine = engine
        self._walks = walks
        self._constrained = constrained
        self._stops: list[tuple[StepPart, StopDecision]] = []

    def decide(self, step: Step) -> None:
        """Which loops end, by host rows, by the front's wish and where a text is over."""
        if over := self._constrained.accept(step):
            self._walks.stop_rows(step.node, over)
        self._stops = self._engine.check_stop(step)
        for part in step.parts:
            wished = self._walks.stopping(part.taken.key, part.taken.rows)
            if wished and (going := step.unfinished_in(part)):
                wished = [i for i in wished if i not in going]
            if wished:
                loops = self._walks.loops_around(part.taken.key)
                self._stops.extend((part, StopDecision(np.asarray(wished), loop, finish=False)) for loop in loops)

    def stops_all(self, following: Step) -> bool:
        """Every row of the step behind has just stopped."""
        if not self._stops:
            return False
        stopped = {part.taken.rows[i] for part, decision in self._stops for i in decision.index.tolist()}
        return stopped.issuperset(following.handles.tolist())

    def end_loops(self, step: Step, gone: set[int]) -> bool:
        """Tell the graph which loops end with this step, if any do. `gone`: rows that this no longer concerns; those
        that are refused are added."""
        ended = False
        for part, decision in self._stops:
            key = part.taken.key
            rows = [row for i in decision.index.tolist() if (row := part.taken.rows[i]) not in gone]
            loops = self._walks.loops_around(key) if decision.finish else ([decision.loop] if decision.loop else [])
            ended = ended or bool(rows)
            try:
                for loop in loops:
                    self._graph.stop_loops(rows, [loop] * len(rows))
                if decision.finish:
                    self._walks.finish_rows(key, rows)
            except GraphError as error:
                self._refuse(step, rows, error, gone)
        self._stops = []
        return ended

    def complete(
        self, step: Step, part: StepPart, gone: set[int], carried: Sequence[Sequence[int]], routed: Routed
    ) -> None:
        """Rows whose run has ended leave the step. The others stay in it for the next step that has `carried` them, or
        go back to the front of their queue."""
        taken = part.taken
        ids = step.outputs.ids_of(part)
        rows = taken.rows
        going = {rows[i] for i in step.unfinished_in(part)}.difference(gone)
        if going or (gone and not gone.isdisjoint(rows)):
            kept = [i for i, row in enumerate(rows) if row not in gone and row not in going]
            lost = [row for row in rows if row in gone and row not in step.dropped]
            if lost:
                self._graph.fail(lost)
            waiting = going.difference(*carried)
            if waiting:
                self._graph.give_back(taken.key, [row for row in rows if row in waiting])
            rows = [rows[i] for i in kept]
            ids = {name: [column[i] for i in kept] for name, column in ids.items()} if rows else ids
        if rows:
            try:
                self._graph.complete(taken.key, rows, ids, routed)
            except GraphError as error:
                self._refuse(step, rows, error, gone)

    def _refuse(self, step: Step, rows: list[int], error: GraphError, gone: set[int]) -> None:
        """What the node made or decided for these rows does not fit its declaration."""
        log.error("%d rows fail: %s", len(rows), error)
        self._graph.fail(rows)
        step.failed.update(dict.fromkeys(rows, f"node {step.node} broke its declaration: {error}"))
        gone.update(rows)
