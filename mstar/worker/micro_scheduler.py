"""The micro-scheduler: which rows of which node the next step runs, and how many tokens of each.

Runs on the worker's loop thread, on host integers only. It takes exactly what it runs: a row it leaves stays in the
graph runtime's queue, so there is no second backlog.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mstar.engine.chunking import NOT_CHUNKED, ChunkingPolicy
from mstar.engine.engine import Engine
from mstar.engine.execution import Portion, Step
from mstar.graph.protocol import GraphRuntime, ReadyKey, TakenRows
from mstar.worker.candidates import Candidates, Run, taken_again
from mstar.worker.chunk_budget import ChunkBudget, Cuts, StepLimits
from mstar.worker.pace import Pace
from mstar.worker.turns import Turns

Order = Callable[[Sequence[int]], Sequence[int] | None]
"""Positions of rows in the order of their requests' importance; None: all are of one priority."""


class Composed(NamedTuple):
    """Rows taken for a step that is not built yet: `spec_ids[i]` belongs to `portions[i]`, `carried` are indexes of
    portions that go on with runs of the step before; the rest was fresh. `served`: keys whose turn this is."""

    spec_ids: tuple[int, ...]
    portions: tuple[Portion, ...]
    carried: tuple[int, ...]
    served: tuple[ReadyKey, ...]


class MicroScheduler:
    """Round-robin over (node, walk) keys by who was served longest ago, so that no node of a composite model starves
    another; rows of walks that may share a step join it. Rows that compute a token or so go along whole, and first;
    prompts and caches that are rebuilt share what is left of the step, those begun before those that wait."""

    def __init__(
        self,
        graph: GraphRuntime,
        engine: Engine,
        limits: StepLimits,
        policies: Mapping[ReadyKey, ChunkingPolicy],
        order: Order,
    ) -> None:
        self._graph = graph
        self._engine = engine
        self._policies = policies
        self._order = order
        self._candidates = Candidates(graph, engine, policies)
        self._turns = Turns()
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        self.limits = limits
        """May be replaced between two steps."""

    def compose(self, cur: Step | None) -> tuple[Step | None, dict[int, str]]:
        """Build the step after `cur` from rows that go on from it and from ready rows. Returns it (None: nothing to
        run) and rows that failed in a hook, with the reason.

        A row that runs ahead and whose node declines waits for its turn, and so does one that is declined beside others
        which are not: a step has no room for it. A fresh one that is declined without others has all its inputs, so
        declining it again and again would hang its request: it fails.
        """
        declined: set[int] = set()
        failed: dict[int, str] = {}
        while (composed := self._gather(cur, declined)) is not None:
            step, refused = self._engine.build(composed.portions)
            if step is not None:
                failed.update(step.failed)
                # Not earlier: rows that were declined do not cost the others of their key the turn.
                self._turns.served(step.node, composed.served)
                step.spec_ids, step.carried = composed.spec_ids, composed.carried
                step.composed_ns = time.monotonic_ns()
                return step, failed
            declined.update(refused)
            taken = [portion.taken for portion in composed.portions]
            fresh_ones = self._return(composed.spec_ids, composed.carried, taken)
            if len(refused) < sum(len(one.rows) for one in taken):
                continue
            for fresh in fresh_ones:
                reason = f"node {fresh.key.node} declined a step whose inputs were all there"
                failed.update(dict.fromkeys(declined.intersection(fresh.rows), reason))
        return None, failed

    def ended(self, step: Step) -> None:
        """The device has ended with it."""
        event = step.event
        if event is not None and event.began_ns:
            seconds = 1e-9 * (event.ended_ns - event.began_ns)
            self._turns.ended(step.node, seconds)
            if (cost := self.limits.costs.get(step.node)) is not None:
                self._paces[step.node].ended(step, seconds, cost)

    def put_back(self, step: Step) -> None:
        """Rows and stream chunks of an abandoned step return to where they were taken from. Carried rows are in the
        step before all the while, whose routing sees to them."""
        self._return(step.spec_ids, step.carried, [part.taken for part in step.parts])

    def _return(
        self, spec_ids: Sequence[int], carried: Sequence[int], taken: Sequence[TakenRows]
    ) -> Sequence[TakenRows]:
        """Returns the fresh ones among `taken`."""
        for spec_id in reversed(spec_ids):
            self._graph.spec_settle(spec_id, ())
        fresh = [one for index, one in enumerate(taken) if index >= len(spec_ids) and index not in carried]
        for one in reversed(fresh):
            self._graph.give_back(one.key, one.rows)
        return fresh

    def _gather(self, cur: Step | None, declined: set[int]) -> Composed | None:
        found = self._candidates
        targets = found.targets(cur, declined)
        waiting = found.carried(cur, declined)
        for key in self._graph.ready_keys():
            waiting.extend(found.fresh(key, declined, self.limits.max_rows))
        keys = {target.key for target in targets}
        if waiting:
            keys.update(run.shares_as for run in waiting)
        if not keys:
            return None
        first, group = self._turn_of(keys)
        most = min(self.limits.max_rows, self._engine.max_rows(first.node))
        whole = [run for key in group for run in waiting if run.shares_as == key and not run.cut]
        cut = [run for run in waiting if run.cut and run.shares_as in group]
        cut.sort(key=lambda run: (run.part is None, not run.restores))
        draft = _Draft(most, kept=int(any(run.shares_as == first for run in (*whole, *cut))))
        # Where a node takes fewer rows than there are, those that wait go before those that would run ahead.
        ahead = max(0, most - bool(cut) - sum(len(run.rows) for run in whole if run.part is None))
        for target in targets:
            if target.key in group and (rows := target.rows[:ahead]):
                armed = self._graph.spec_prepare(target.key, rows)
                draft.spec_ids.append(armed.spec_id)
                draft.add(armed.taken, len(rows))
                ahead -= len(rows)
                draft.served.append(target.key)
        for run in whole:
            if run.part is not None:
                rows = run.rows[:ahead]
                num_tokens = len(rows)
                ahead -= num_tokens
            else:
                if run.key == first:
                    draft.kept = 0
                rows, num_tokens = self._whole_rows(run, draft, at_least=int(run.key == first))
            if rows:
                self._take(draft, run, rows, num_tokens)
        if cut:
            self._add_chunks(draft, cut)
        if not draft.portions:
            return None
        return Composed(tuple(draft.spec_ids), tuple(draft.portions), tuple(draft.carried), tuple(draft.served))

    def _take(
        self, draft: _Draft, run: Run, rows: list[int], num_tokens: int, limits: np.ndarray | None = None
    ) -> None:
        if run.part is not None:
            draft.carried.append(len(draft.portions))
            taken = taken_again(run.part, rows)
        else:
            taken = self._graph.take(run.key, rows)
        draft.add(taken, num_tokens, limits)
        draft.served.append(run.shares_as)

    def _whole_rows(self, run: Run, draft: _Draft, at_least: int) -> tuple[list[int], int]:
        """Rows from the head of the queue that fit, and their tokens. Rows of one token always fit; of the others
        `at_least` many, so that a long prompt that cannot be cut has its turn."""
        rows = run.rows[: max(0, draft.rows - draft.kept)]
        if not rows:
            return rows, 0
        tokens = self._engine.pending_tokens(run.key.node, run.key.walk, np.array(rows, np.int64))
        if tokens.max() > 1:
            left = self.limits.max_step_tokens - draft.tokens
            fits = int(np.searchsorted(np.cumsum(tokens), left, side="right"))
            rows = rows[: max(at_least, fits)]
        return rows, int(tokens[: len(rows)].sum())

    def _add_chunks(self, draft: _Draft, runs: list[Run]) -> None:
        """Chunks of rows whose tokens may be computed over several steps: first come, first served."""
        node = runs[0].key.node
        cost = self.limits.costs.get(node)
        contexts = 0
        if cost is not None and draft.portions:
            others = np.array([row for portion in draft.portions for row in portion.taken.rows], np.int64)
            contexts = int(self._engine.lengths(node, others).sum())
        waited_s = self._turns.waited_s(node)
        most, pace = self.limits.max_step_tokens, self._paces[node]
        budget = ChunkBudget(most, cost, draft.num_rows, draft.tokens, contexts, waited_s, pace)
        cuts = [Cuts(self._engine, run, self._policies[run.shares_as]) for run in runs]
        places = [(at, index) for at in range(len(runs)) for index in range(len(runs[at].rows))]
        order = self._order([runs[at].rows[index] for at, index in places])
        if order is not None:
            places = [places[position] for position in order]
        for at, index in places[: draft.rows]:
            if not cuts[at].add(index, budget):
                break
        for made in sorted(cuts, key=lambda made: not made.run.restores):  # the walk of the last part is the step's
            if made.rows:
                self._take(draft, made.run, made.rows, sum(made.limits), np.array(made.limits, np.int32))

    def _turn_of(self, keys: set[ReadyKey]) -> tuple[ReadyKey, Sequence[ReadyKey]]:
        """The key that was served longest ago, and with it keys that may all share one step, decode-like ones first."""
        if len(keys) == 1:
            (first,) = keys
            return first, (first,)
        in_order = self._turns.in_order(keys)
        first, group = in_order[0], in_order[:1]
        for key in in_order[1:]:
            if all(self._share(key, other) for other in group):
                group.append(key)
        return first, sorted(group, key=self._decode_first)

    def _share(self, a: ReadyKey, b: ReadyKey) -> bool:
        if a.node != b.node:
            return False
        return a == b or b.walk in self._batch_with(a) or a.walk in self._batch_with(b)

    def _batch_with(self, key: ReadyKey) -> Sequence[str]:
        return self._policies.get(key, NOT_CHUNKED).batch_with

    def _decode_first(self, key: ReadyKey) -> tuple[bool, ReadyKey]:
        return (not self._batch_with(key), key)


class _Draft:
    """A step that is being put together. `rows` are left; `kept` of them are for the key whose turn it is.
    `num_rows` and `tokens` are in it."""

    __slots__ = ("carried", "kept", "num_rows", "portions", "rows", "served", "spec_ids", "tokens")

    def __init__(self, rows: int, kept: int) -> None:
        self.rows = rows
        self.kept = kept
        self.num_rows = 0
        self.tokens = 0
        self.spec_ids: list[int] = []
        self.portions: list[Portion] = []
        self.carried: list[int] = []
        self.served: list[ReadyKey] = []

    def add(self, taken: TakenRows, num_tokens: int, limits: np.ndarray | None = None) -> None:
        self.portions.append(Portion(taken, limits))
        self.num_rows += len(taken.rows)
        self.rows -= len(taken.rows)
        self.tokens += num_tokens
