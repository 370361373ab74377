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
        run) and rows that failed in a hook, with the reason.

        A speculated row whose node declines waits for its turn. A fresh one has all its inputs, so declining it again
        and again would hang its request: it fails.
        """
        declined: set[int] = set()
        failed: dict[int, str] = {}
        while (composed := self._gather(cur, declined)) is not None:
            step, refused = self._engine.build(composed.taken)
            if step is not None:
                failed.update(step.failed)
                step.spec_ids = composed.spec_ids
                step.composed_ns = time.monotonic_ns()
                return step, failed
            declined.update(refused)
            self._return(composed.spec_ids, composed.taken)
            for taken in composed.taken[len(composed.spec_ids) :]:
                reason = f"node {taken.key.node} declined a step whose inputs were all there"
                failed.update(dict.fromkeys(declined.intersection(taken.rows), reason))
        return None, failed

    def put_back(self, step: Step) -> None:
        """Rows and stream chunks of an abandoned step return to where they were taken from."""
        self._return(step.spec_ids, [part.taken for part in step.parts])

    def _return(self, spec_ids: Sequence[int], taken: Sequence[TakenRows]) -> None:
        for spec_id in reversed(spec_ids):
            self._graph.spec_settle(spec_id, ())
        for fresh in reversed(taken[len(spec_ids) :]):
            self._graph.give_back(fresh.key, fresh.rows)

    def _gather(self, cur: Step | None, declined: set[int]) -> Composed | None:
        targets = self._targets(cur, declined)
        ready = self._graph.ready_keys()
        keys = {target.key for target in targets}.union(ready)
        if not keys:
            return None
        first, group = self._turn_of(keys)
        self._turn += 1
        most = min(self._limits.max_rows, self._engine.max_rows(first.node))
        room = _Room(most, self._limits.max_step_tokens)
        # Where a node takes fewer rows than there are, those that wait go before those that would run ahead.
        spare = max(0, most - sum(self._graph.num_ready(key) for key in group if key in ready))
        spec_ids: list[int] = []
        taken: list[TakenRows] = []
        for target in targets:
            if target.key in group and (rows := target.rows[:spare]):
                armed = self._graph.spec_prepare(target.key, rows)
                spec_ids.append(armed.spec_id)
                taken.append(armed.taken)
                room.take(len(rows), len(rows))
                spare -= len(rows)
                self._served[target.key] = self._turn
        if ready:
            room.kept = int(first in ready)
            for key in group:
                if key == first:
                    room.kept = 0
                if key in ready and (rows := self._fresh_rows(key, room, int(key == first), declined)):
                    taken.append(self._graph.take(key, rows))
                    self._served[key] = self._turn
        return Composed(tuple(spec_ids), tuple(taken)) if taken else None

    def _turn_of(self, keys: set[ReadyKey]) -> tuple[ReadyKey, Sequence[ReadyKey]]:
        """The key that was served longest ago, and with it the keys that may share its step, decode-like ones first."""
        if len(keys) == 1:
            (first,) = keys
            return first, (first,)
        first = min(keys, key=lambda key: (self._served.get(key, -1), key))
        return first, sorted((key for key in keys if self._share(first, key)), key=self._decode_first)

    def _targets(self, cur: Step | None, declined: set[int]) -> list[SpecTarget]:
        if cur is None:
            return []
        unwanted = cur.dropped | declined
        targets: list[SpecTarget] = []
        for part in cur.parts:
            rows = part.taken.rows
            if unwanted:
                rows = [row for row in rows if row not in unwanted]
            targets.extend(target for target in self._graph.speculate_node(part.taken.key, rows) if target.rows)
        return targets

    def _fresh_rows(self, key: ReadyKey, room: _Room, at_least: int, declined: set[int]) -> list[int]:
        """Rows from the head of the key's queue that fit; `at_least` of them whatever their tokens, so that a long
        prompt beside rows that never end has its turn."""
        limit = room.rows - room.kept
        rows = self._graph.peek(key, limit + len(declined)) if limit > 0 else []
        if declined:
            rows = [row for row in rows if row not in declined]
        rows = rows[:limit]
        if not rows:
            return []
        tokens = self._engine.pending_tokens(key.node, np.asarray(rows, np.int64))
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
    """What is left of a step's limits. `kept`: rows of it that are for the key whose turn it is."""

    __slots__ = ("kept", "rows", "tokens")

    def __init__(self, rows: int, tokens: int) -> None:
        self.rows = rows
        self.tokens = tokens
        self.kept = 0

    def take(self, rows: int, tokens: int) -> None:
        self.rows -= rows
        self.tokens -= tokens
