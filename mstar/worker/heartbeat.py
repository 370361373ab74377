"""Heartbeat of a worker: a thread with a socket of its own that tells the front "alive" and the age of the step.

The loop thread only stores integers and swaps in a finished dictionary; this thread only reads them. It must not touch
anything else of the worker, so that a long step never delays it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from mstar.communication.bus import Bus
from mstar.communication.messages import Heartbeat

INTERVAL_S = 0.25


class StepAge:
    """When the step in flight was submitted; 0 between steps. Written by the loop thread, read by the heartbeat."""

    __slots__ = ("gauges", "since_ns")

    def __init__(self) -> None:
        self.since_ns = 0
        self.gauges: Mapping[str, float] = {}

    def seconds(self) -> float:
        since = self.since_ns
        return (time.monotonic_ns() - since) / 1e9 if since else 0.0


class HeartbeatThread:
    """Sends a `Heartbeat` every `INTERVAL_S` until `close`. `bus` is used by this thread alone."""

    def __init__(self, bus: Bus, destination: str, rank: int, incarnation: int, age: StepAge) -> None:
        self._bus = bus
        self._destination = destination
        self._rank = rank
        self._incarnation = incarnation
        self._age = age
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
            self._closing.wait(INTERVAL_S)
