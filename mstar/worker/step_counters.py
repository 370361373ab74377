"""Step counters and the gauges of a worker, as the heartbeat reports them.

Runs on the worker's loop thread; the finished dictionary is swapped in whole for the heartbeat thread to read.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np

from mstar.engine.execution import Step
from mstar.graph.protocol import ReadyKey
from mstar.worker.heartbeat import StepAge

REFRESH_NS = 100_000_000
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the histogram of rows per step."""


class StepCounters:
    """`speculated` steps were composed before the end of the step before them, by timestamps; `fresh` ones were not;
    `abandoned` ones were never submitted. `num_prefill_tokens`: prompt tokens that submitted steps computed, each for
    the first time; `num_recomputed_tokens`: tokens that they computed again, because their request had been preempted.
    """

    def __init__(
        self,
        gauges: Callable[[], Mapping[str, float]],
        sums: Callable[[], Mapping[str, float]],
        prompt_computed: np.ndarray,
        caching_nodes: frozenset[str],
    ) -> None:
        """`gauges`: what is held now. `sums`: over the worker's life, where the loop's time went and what was sent.
        `prompt_computed` int32 [handles]: how much of each prompt has been computed; written here, emptied by who
        gives handles out. `caching_nodes`: those with a cache, whose steps compute prompts; what other nodes call
        tokens does not count."""
        self._caching_nodes = caching_nodes
        self._prompt_computed = prompt_computed
        self._gauges = gauges
        self._sums = sums
        self._steps_by_rows = [0] * (len(ROW_BOUNDS) + 1)
        self._num_rows = 0
        self._by_node: dict[ReadyKey, list[int]] = {}
        self._refreshed_ns = 0
        self.speculated = 0
        self.fresh = 0
        self.num_abandoned = 0
        self.num_prefill_tokens = 0
        self.num_recomputed_tokens = 0

    def submitted(self, step: Step, before: Step | None) -> None:
        """`before`: the step that was on the device meanwhile."""
        self._steps_by_rows[bisect_left(ROW_BOUNDS, step.num_rows)] += 1
        self._num_rows += step.num_rows
        for part in step.parts:
            activity = self._by_node.setdefault(part.taken.key, [0, 0])
            activity[0] += 1
            activity[1] += part.end - part.begin
        self._count_prompts(step)
        ended_ns = before.event.ended_ns if before is not None and before.event is not None else None
        if ended_ns is not None and (ended_ns == 0 or step.composed_ns < ended_ns):
            self.speculated += 1
        else:
            self.fresh += 1

    def _count_prompts(self, step: Step) -> None:
        if step.node not in self._caching_nodes:
            return
        columns = step.columns
        some = columns.lengths < columns.num_prompt
        if step.unfinished is not None:
            some = some | step.unfinished  # what is restored may lie behind the prompt
        for row in some.nonzero()[0].tolist():
            handle, length, span = int(columns.handles[row]), int(columns.lengths[row]), int(step.spans[row])
            before = int(self._prompt_computed[handle])
            end = min(length + span, int(columns.num_prompt[row]))
            new = max(end - max(length, before), 0)
            self._prompt_computed[handle] = max(before, end)
            self.num_prefill_tokens += new
            self.num_recomputed_tokens += span - new

    def abandoned(self) -> None:
        self.num_abandoned += 1

    def refresh_if_due(self, age: StepAge) -> None:
        """Publish while the worker is busy, a few times a second."""
        if time.monotonic_ns() - self._refreshed_ns > REFRESH_NS:
            self.refresh(age)

    def refresh(self, age: StepAge) -> None:
        """Publish all gauges of the worker."""
        self._refreshed_ns = time.monotonic_ns()
        age.gauges = {
            **self._gauges(),
            **self._sums(),
            **self._row_histogram(),
            **self.activity(),
            "mstar_prefill_tokens_computed_total": float(self.num_prefill_tokens),
            "mstar_recomputed_tokens_total": float(self.num_recomputed_tokens),
            'mstar_steps_total{kind="speculated"}': float(self.speculated),
            'mstar_steps_total{kind="fresh"}': float(self.fresh),
            'mstar_steps_total{kind="abandoned"}': float(self.num_abandoned),
        }

    def _row_histogram(self) -> dict[str, float]:
        bounds = [*map(str, ROW_BOUNDS), "+Inf"]
        below = accumulate(self._steps_by_rows)
        histogram = {f'mstar_step_rows_bucket{{le="{le}"}}': float(n) for le, n in zip(bounds, below, strict=True)}
        return histogram | {
            "mstar_step_rows_sum": float(self._num_rows),
            "mstar_step_rows_count": float(sum(self._steps_by_rows)),
        }

    def activity(self) -> dict[str, float]:
        """Steps and rows by node and walk."""
        gauges: dict[str, float] = {}
        for key, (num_steps, num_rows) in self._by_node.items():
            labels = f'{{node="{key.node}",walk="{key.walk}"}}'
            gauges["mstar_node_steps_total" + labels] = float(num_steps)
            gauges["mstar_node_rows_total" + labels] = float(num_rows)
        return gauges
