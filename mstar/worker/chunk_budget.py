"""`StepLimits`: how much one step may hold; `ChunkBudget`: how the chunks in it share what the other rows leave.

Loop thread; arithmetic only. Where the time of a step can be foretold (`StepCost`), chunks are cut by time, so that the
streams that run keep their pace; otherwise by a number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mstar.engine.chunking import MIN_CHUNK, ChunkingPolicy, allot
from mstar.engine.engine import Engine
from mstar.engine.step_cost import StepCost
from mstar.worker.candidates import Run
from mstar.worker.pace import AS_FORETOLD, Pace

MIN_TIMED_CHUNK = 8
"""The same where chunks are cut by time: less, because deep in a long prompt each token takes its time."""
CHUNK_STEP_S = 0.1
"""What a step without decode rows may take: a request that arrives meanwhile waits for its end."""
CHUNK_STEP_TOKENS = 128
"""What such a step computes at least, however slow the machine."""
MIXED_STEP_FACTOR = 2.5
"""What a step with decode rows may take, in times of the step of those rows alone. The promise to running streams is
3; what is between them is for noise and for the error of the foretelling."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`max_rows` rows and `max_step_tokens` tokens per step; one row always fits. `costs`: by node, times of its steps
    on this machine, where chunks are to be cut by time as well."""

    max_rows: int
    max_step_tokens: int
    costs: Mapping[str, StepCost] = field(default_factory=dict)


class ChunkBudget:
    """What one step has left for chunks; `cut` takes from it, row after row."""

    def __init__(
        self,
        max_step_tokens: int,
        cost: StepCost | None,
        num_others: int,
        other_tokens: int,
        contexts: int,
        waited_s: float = 0.0,
        pace: Pace = AS_FORETOLD,
    ) -> None:
        """`num_others` rows with `other_tokens` tokens go along whole and read `contexts` tokens of cache together. The
        first chunk is cut whatever they leave, unless they have waited for steps of other nodes already, for
        `waited_s`: then there may be none, and the chunk comes with the node's next turn. `pace` corrects `cost`."""
        self._cost = cost
        self._tokens = max_step_tokens - other_tokens
        self._seconds = 0.0
        self._worthwhile = MIN_TIMED_CHUNK if num_others and waited_s else 0
        if cost is None:
            self._least = min(MIN_CHUNK, max_step_tokens)
        elif num_others:
            self._least = 0 if waited_s else MIN_TIMED_CHUNK
            allowed = MIXED_STEP_FACTOR * pace.decode * cost.decode_s(num_others, contexts) - waited_s
            self._seconds = allowed / pace.mixed - cost.mixed_s(other_tokens, contexts)
        else:
            self._least = CHUNK_STEP_TOKENS
            self._seconds = CHUNK_STEP_S / pace.mixed - cost.mixed_s(0, 0)

    def cut(self, start: int, pending: int, align: int) -> int:
        """Tokens for the next row, which has `start` in its cache and `pending` to compute. 0: nothing is left."""
        cost = self._cost
        room = self._tokens
        if cost is not None:
            room = min(room, cost.chunk_tokens(self._seconds, start))
            if room < self._worthwhile:
                room = 0
        starts, rest = np.array([start], np.int32), np.array([pending], np.int32)
        [count] = allot(starts, rest, room, align=align, at_least=self._least).tolist()
        self._least = 0
        self._tokens -= count
        if cost is not None:
            self._seconds -= cost.chunk_s(count, start)
        return count


class Cuts:
    """The rows of one run that a step has chunks of: `limits[i]` tokens of `rows[i]`."""

    def __init__(self, engine: Engine, run: Run, policy: ChunkingPolicy) -> None:
        self.run = run
        self.rows: list[int] = []
        self.limits: list[int] = []
        self._engine = engine
        self._policy = policy
        self._adopts = policy.reuse_prefix and run.part is None and not run.restores
        self._starts: list[int] = []
        self._pending: list[int] = []

    def add(self, index: int, budget: ChunkBudget) -> bool:
        """Cut a chunk of the row at `index` of the run. False: nothing is left of the budget."""
        run, node = self.run, self.run.key.node
        if not self._starts:
            handles = np.array(run.rows, np.int64)
            self._starts = self._engine.lengths(node, handles).tolist()
            self._pending = self._engine.pending_tokens(node, run.key.walk, handles).tolist()
        row, start, pending = run.rows[index], self._starts[index], self._pending[index]
        if self._adopts:
            start += self._engine.memory.extend_prefix(node, row)
            [pending] = self._engine.pending_tokens(node, run.key.walk, np.array([row], np.int64)).tolist()
        count = budget.cut(start, pending, self._policy.align)
        if count == 0:
            return False
        self.rows.append(row)
        self.limits.append(count)
        return True
