"""The micro-scheduler: which rows of which node the next step runs.

Runs on the worker's loop thread, on host integers only. It takes exactly what it runs: a row it leaves stays in the
graph runtime's queue, so there is no second backlog.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mstar.engine.engine import Engine
from mstar.engine.execution import Step
from mstar.graph.protocol import GraphRuntime, ReadyKey, SpecTarget, TakenRows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`max_rows` rows and `max_step_tokens` tokens per step; one row always fits."""

    max_rows: int
    max_step_tokens: int


class Composed(NamedTuple):
    """Rows taken for a step that is not built yet: `spec_ids[i]` belongs to `taken[i]`; the rest was fresh."""

    spec_ids: tuple[int, ...]
    taken: tuple[TakenRows, ...]


class MicroScheduler:
    """Round-robin over (node, walk) keys by who was served longest ago, so that no node of a composite model starves
    another; rows of walks that may share a step join it, decode-like rows first."""

    def __init__(
        self, graph: GraphRuntime, engine: Engine, limits: StepLimits, batch_with: Mapping[ReadyKey, frozenset[str]]
    ) -> None:
        self._graph = graph
        self._engine = engine
        self._limits = limits
        self._batch_with = batch_with
        self._served: dict[ReadyKey, int] = {}
        self._turn = 0

    def compose(self, cur: Step | None) -> tuple[Step | None, dict[int, str]]:
        """Build the step after `cur` from rows that go on from it and from ready rows. Returns it (None: nothing to
        run) and rows that failed in a hook, with the reason."""
        composed = self._gather(cur)
        if composed is None:
            return None, {}
        step, declined = self._engine.build(composed.taken)
        failed = self._decline(composed, declined) if declined else {}
        if step is None:
            for spec_id in composed.spec_ids:
                self._graph.spec_settle(spec_id, ())
            return None, failed
        failed.update(step.failed)
        step.spec_ids = composed.spec_ids
        step.composed_ns = time.monotonic_ns()
        return step, failed

    def put_back(self, step: Step) -> None:
        """Rows and stream chunks of an abandoned step return to where they were taken from."""
        num_spec = len(step.spec_ids)
        for spec_id in reversed(step.spec_ids):
            self._graph.spec_settle(spec_id, ())
        for part in reversed(step.parts[num_spec:]):
            if part.taken.rows:
                self._graph.give_back(part.taken.key, part.taken.rows)

    def _decline(self, composed: Composed, declined: Sequence[int]) -> dict[int, str]:
        """Rows whose node declined the step. A speculated row waits for its turn; a fresh one has all its inputs, so
        declining it again and again would hang the request: it fails."""
        failed: dict[int, str] = {}
        gone = set(declined)
        for index, taken in enumerate(composed.taken):
            rows = [row for row in taken.rows if row in gone]
            if not rows:
                continue
            if index < len(composed.spec_ids):
                self._graph.spec_drop(composed.spec_ids[index], rows)
            else:
                self._graph.give_back(taken.key, rows)
                failed.update(dict.fromkeys(rows, f"node {taken.key.node} declined a step whose inputs were all there"))
        return failed

    def _gather(self, cur: Step | None) -> Composed | None:
        targets = self._targets(cur)
        ready = self._graph.ready_keys()
        keys = {target.key for target in targets}.union(ready)
        if not keys:
            return None
        first = min(keys, key=lambda key: (self._served.get(key, -1), key))
        group = sorted((key for key in keys if self._share(first, key)), key=self._decode_first)
        self._turn += 1
        room = _Room(self._limits.max_rows, self._limits.max_step_tokens)
        spec_ids: list[int] = []
        spec: list[TakenRows] = []
        fresh: list[TakenRows] = []
        for target in targets:
            if target.key in group:
                armed = self._graph.spec_prepare(target.key, target.rows)
                spec_ids.append(armed.spec_id)
                spec.append(armed.taken)
                room.take(len(target.rows), len(target.rows))
                self._served[target.key] = self._turn
        for key in group:
            if key in ready and (rows := self._fresh_rows(key, room, at_least=int(key == first))):
                fresh.append(self._graph.take(key, rows))
                self._served[key] = self._turn
        if not spec and not fresh:
            return None
        return Composed(tuple(spec_ids), tuple(spec + fresh))

    def _targets(self, cur: Step | None) -> list[SpecTarget]:
        if cur is None:
            return []
        return [
            target
            for part in cur.parts
            for target in self._graph.speculate_node(part.taken.key, self._alive(cur, part.taken))
            if target.rows
        ]

    @staticmethod
    def _alive(cur: Step, taken: TakenRows) -> Sequence[int]:
        gone = cur.dropped
        return [row for row in taken.rows if row not in gone] if gone else taken.rows

    def _fresh_rows(self, key: ReadyKey, room: _Room, at_least: int) -> list[int]:
        """Rows from the head of the key's queue that fit; `at_least` of them whatever their tokens, so that a long
        prompt beside rows that never end has its turn."""
        rows = self._graph.peek(key, min(room.rows, self._engine.max_rows(key.node)))
        if not rows:
            return []
        tokens = self._engine.pending_tokens(key.node, np.asarray(rows, np.int32))
        fits = max(at_least, int(np.searchsorted(np.cumsum(tokens), room.tokens, side="right")))
        rows = rows[:fits]
        room.take(len(rows), int(tokens[:fits].sum()))
        return rows

    def _share(self, a: ReadyKey, b: ReadyKey) -> bool:
        if a.node != b.node:
            return False
        return a == b or b.walk in self._batch_with.get(a, ()) or a.walk in self._batch_with.get(b, ())

    def _decode_first(self, key: ReadyKey) -> tuple[bool, ReadyKey]:
        return (not self._batch_with.get(key), key)


class _Room:
    """What is left of a step's limits."""

    __slots__ = ("rows", "tokens")

    def __init__(self, rows: int, tokens: int) -> None:
        self.rows = rows
        self.tokens = tokens

    def take(self, rows: int, tokens: int) -> None:
        self.rows -= rows
        self.tokens -= tokens
