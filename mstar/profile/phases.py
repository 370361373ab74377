"""Stage times of the worker's loop: the nine names, CPU time of the loop thread, and wall time of the waits.

Runs on the worker's loop thread. The stage that waits for the device (`WAITS`) is measured in wall time and is never
added to work: on a CPU platform the device wait is `await_gpu`, on CUDA it is `event_sync`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol

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


class PhaseRecorder:
    """Keeps the stage times of the last `limit` ticks in which a step ended, in nanoseconds."""

    def __init__(self, limit: int = 4096) -> None:
        self.ticks: deque[Mapping[str, int]] = deque(maxlen=limit)
        self._tick: dict[str, int] = {}
        self._cpu = 0
        self._wall = 0

    def begin(self) -> None:
        self._tick = dict.fromkeys(PHASES, 0)
        self._wall = time.monotonic_ns()
        self._cpu = time.thread_time_ns()

    def mark(self, phase: str) -> None:
        cpu = time.thread_time_ns()
        if phase in WAITS:
            wall = time.monotonic_ns()
            self._tick[phase] += wall - self._wall
            self._wall = wall
        else:
            self._tick[phase] += cpu - self._cpu
            self._wall = time.monotonic_ns()
        self._cpu = cpu

    def end(self, step_ended: bool) -> None:
        """A tick in which no step ended (start, idle) is dropped."""
        if step_ended:
            self.ticks.append(self._tick)
