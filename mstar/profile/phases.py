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


class NoPhaseClock:
    """Measures nothing; the loop's default."""

    def begin(self) -> None: ...
    def mark(self, phase: str) -> None: ...
    def end(self, step_ended: bool) -> None: ...


class Tick(NamedTuple):
    """One tick in which a step ended. `cpu_ns`: CPU time of the loop thread by stage, all nine. `wait_ns`: what the
    stages of `WAITS` took beyond their CPU time, on the wall clock; never part of the work."""

    cpu_ns: Mapping[str, int]
    wait_ns: Mapping[str, int]


class PhaseRecorder:
    """Keeps the stage times of the last `limit` ticks in which a step ended."""

    def __init__(self, limit: int = 4096) -> None:
        self.ticks: deque[Tick] = deque(maxlen=limit)
        self._cpu_ns: dict[str, int] = {}
        self._wait_ns: dict[str, int] = {}
        self._cpu = 0
        self._wall = 0

    def begin(self) -> None:
        self._cpu_ns = dict.fromkeys(PHASES, 0)
        self._wait_ns = dict.fromkeys(WAITS, 0)
        self._wall = time.monotonic_ns()
        self._cpu = time.thread_time_ns()

    def mark(self, phase: str) -> None:
        cpu = time.thread_time_ns()
        wall = time.monotonic_ns()
        spent = cpu - self._cpu
        self._cpu_ns[phase] += spent
        if phase in WAITS:
            self._wait_ns[phase] += max(0, wall - self._wall - spent)
        self._cpu = cpu
        self._wall = wall

    def end(self, step_ended: bool) -> None:
        """A tick in which no step ended (start, idle) is dropped."""
        if step_ended:
            self.ticks.append(Tick(self._cpu_ns, self._wait_ns))
