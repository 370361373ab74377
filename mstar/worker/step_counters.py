"""Step counters and the gauges of a worker, as the heartbeat reports them.

Runs on the worker's loop thread; the finished dictionary is swapped in whole for the heartbeat thread to read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mstar.engine.execution import Step
from mstar.worker.heartbeat import StepAge

REFRESH_NS = 100_000_000


class StepCounters:
    """`speculated` steps were composed before the end of the step before them, by timestamps; `fresh` ones were not;
    `abandoned` ones were never submitted."""

    def __init__(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._gauges = gauges
        self._refreshed_ns = 0
        self.speculated = 0
        self.fresh = 0
        self.num_abandoned = 0
        self.prefill_tokens = 0

    def submitted(self, step: Step, before: Step | None) -> None:
        ended_ns = before.event.ended_ns if before is not None and before.event is not None else None
        if ended_ns is not None and (ended_ns == 0 or step.composed_ns < ended_ns):
            self.speculated += 1
        else:
            self.fresh += 1

    def abandoned(self) -> None:
        self.num_abandoned += 1

    def due(self) -> bool:
        return time.monotonic_ns() - self._refreshed_ns > REFRESH_NS

    def refresh(self, age: StepAge) -> None:
        """Publish all gauges of the worker."""
        self._refreshed_ns = time.monotonic_ns()
        age.gauges = {
            **self._gauges(),
            'mstar_steps_total{kind="speculated"}': float(self.speculated),
            'mstar_steps_total{kind="fresh"}': float(self.fresh),
            'mstar_steps_total{kind="abandoned"}': float(self.num_abandoned),
        }
