"""Stage times of the worker's loop: the nine names, CPU time of the loop thread, and wall time of the waits.

Runs on the worker's loop thread. Waiting for the device happens in the stages of `WAITS`: on a CPU platform in
`await_gpu`, on CUDA in `event_sync`. It takes no CPU time, is measured apart and is never added to work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

PHASES: Final = (
    "teardown",
    "intake",
    "compose",
    "preplan",
    "await_gpu",
    "submit",
    "event_sync",
    "check_stop",
    "route",
)
"""The stages in the order of the loop. `worker.py`, `benchmark/worker_phases` and the documentation use these names."""

WAITS: Final = frozenset({"await_gpu", "event_sync"})


class PhaseClock(Protocol):
    """`begin` starts a tick; `mark(name)` charges all time since the last mark to that stage; `end` closes it."""

    def begin(self) -> None: ...
    def mark(self, phase: str) -> None: ...
    def end(self, step_ended: bool) -> None: ...


class Tick(NamedTuple):
    """One tick in which a step ended. `cpu_ns`: CPU time of the loop thread by stage, all nine. `wait_ns`: what the
    stages of `WAITS` took beyond their CPU time, on the wall clock; never part of the work."""

    cpu_ns: Mapping[str, int]
    wait_ns: Mapping[str, int]


class _StageTimes:
    """Charges time to stages: `cpu_ns` CPU time of the calling thread by stage, all nine; `wait_ns` what the stages of
    `WAITS` took beyond it, on the wall clock."""

    def __init__(self) -> None:
        self._clear()
        self._cpu = 0
        self._wall = 0

    def _clear(self) -> None:
        self.cpu_ns: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.wait_ns: dict[str, int] = dict.fromkeys(sorted(WAITS), 0)

    def begin(self) -> None:
        self._wall = time.monotonic_ns()
        self._cpu = time.thread_time_ns()

    def mark(self, phase: str) -> None:
        cpu = time.thread_time_ns()
        wall = time.monotonic_ns()
        spent = cpu - self._cpu
        self.cpu_ns[phase] += spent
        if phase in WAITS:
            self.wait_ns[phase] += max(0, wall - self._wall - spent)
        self._cpu = cpu
        self._wall = wall


class PhaseTotals(_StageTimes):
    """Sums over the worker's life: the loop's own clock, and what `/metrics` shows."""

    def end(self, step_ended: bool) -> None:
        """Ticks without a step count as well: their work is the loop's too."""

    def gauges(self) -> dict[str, float]:
        """Seconds of CPU time, and seconds waited for the device, by stage."""
        cpu = {f'mstar_phase_cpu_seconds_total{{phase="{name}"}}': ns / 1e9 for name, ns in self.cpu_ns.items()}
        waits = {f'mstar_phase_wait_seconds_total{{phase="{name}"}}': ns / 1e9 for name, ns in self.wait_ns.items()}
        return cpu | waits


class PhaseRecorder(_StageTimes):
    """Keeps the stage times of the last `limit` ticks in which a step ended."""

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self.ticks: deque[Tick] = deque(maxlen=limit)

    def begin(self) -> None:
        self._clear()
        super().begin()

    def end(self, step_ended: bool) -> None:
        """A tick in which no step ended (start, idle) is dropped."""
        if step_ended:
            self.ticks.append(Tick(self.cpu_ns, self.wait_ns))
