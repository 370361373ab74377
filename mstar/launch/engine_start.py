"""Warms an engine up and captures its walks, and says in the log how far it is. The loading thread of a worker."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from mstar.engine.engine import Engine

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Between two lines of progress."""


def start_engine(engine: Engine) -> None:
    """Raises `CaptureError`."""
    log.info("warm-up: kernels that are new to this machine are compiled, which takes a minute or two")
    engine.warmup()
    engine.capture(CaptureLog())


class CaptureLog:
    """A `Progress`: a line of the log now and then, with the time that is left if the captures that are left take as
    long as those so far. `now`: seconds of a clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = 0.0
        self._logged = -math.inf

    def __call__(self, label: str, done: int, total: int) -> None:
        now = self._now()
        if done == 0:
            self._began, self._logged = now, -math.inf
        took = now - self._began
        if done == total:
            log.info("%s: %d of %d done in %.1f s", label, done, total, took)
        elif now - self._logged >= INTERVAL_S:
            self._logged = now
            left = f", about {math.ceil(took / done * (total - done))} s left" if done else ""
            log.info("%s, %d of %d%s", label, done + 1, total, left)
