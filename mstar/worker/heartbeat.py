"""Heartbeat of a worker: a thread with a socket of its own that tells the front "alive" and the age of the step.

The loop thread only stores integers and swaps in finished objects; this thread only reads them. It must not touch
anything else of the worker, so that a long step never delays it. It also is the watchdog's eye inside the process: of a
step that is older than it may be, the stacks of all threads go to the log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from mstar.communication.bus import Bus
from mstar.communication.messages import Heartbeat
from mstar.engine.execution import Step
from mstar.profile.stacks import dump_stacks

INTERVAL_S = 0.25


class StepAge:
    """Where the loop is; written by the loop thread, read by the heartbeat. `since_ns`: when the step in flight was
    submitted, `step`: that step; `tick_ns`: when the loop began its present pass. 0 and None: between steps, at rest.
    """

    __slots__ = ("gauges", "since_ns", "step", "tick_ns")

    def __init__(self) -> None:
        self.since_ns = 0
        self.step: Step | None = None
        self.tick_ns = 0
        self.gauges: Mapping[str, float] = {}

    def began_ns(self) -> int:
        """Start of the step in flight, or of the loop's pass if that is older; 0: neither."""
        return min((at for at in (self.since_ns, self.tick_ns) if at), default=0)

    def seconds(self) -> float:
        """Age of the step in flight; a loop that hangs beside it counts as a step that does."""
        began = self.began_ns()
        return (time.monotonic_ns() - began) / 1e9 if began else 0.0

    def what(self) -> str:
        """The step in flight, for the log."""
        step = self.step
        if step is None:
            return "no step"
        walks = " and ".join(part.taken.key.walk for part in step.parts)
        return f"a step of {step.num_rows} rows of node {step.node!r} ({walks})"


class HeartbeatThread:
    """Sends a `Heartbeat` every `INTERVAL_S` until `close`. `bus` is used by this thread alone. `step_timeout_s`: a
    step that is older has the stacks dumped, once."""

    def __init__(
        self, bus: Bus, destination: str, rank: int, incarnation: int, age: StepAge, *, step_timeout_s: float
    ) -> None:
        self._bus = bus
        self._destination = destination
        self._rank = rank
        self._incarnation = incarnation
        self._age = age
        self._step_timeout_s = step_timeout_s
        self._dumped_ns = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            beat = Heartbeat(
                rank=self._rank,
                incarnation=self._incarnation,
                step_age_s=self._age.seconds(),
                gauges=dict(self._age.gauges),
            )
            self._bus.send(self._destination, (beat,))
            if beat.step_age_s > self._step_timeout_s:
                self._dump(beat.step_age_s)
            self._closing.wait(INTERVAL_S)

    def _dump(self, age_s: float) -> None:
        began = self._age.began_ns()
        if began and began != self._dumped_ns:
            self._dumped_ns = began
            dump_stacks(
                f"worker {self._rank} has been in one step for {age_s:.1f} s, with {self._age.what()} in flight"
            )
