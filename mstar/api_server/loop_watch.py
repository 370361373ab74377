"""A watch over the front's own event loop, on a thread of its own: of a loop that does not answer for too long, the
stacks of all threads go to the log. It must not touch anything that belongs to the loop.

A stuck loop cannot answer `/health` either, so this is for whoever reads the log.
"""

from __future__ import annotations

import asyncio
import threading

from mstar.profile.stacks import dump_stacks

GRACE_S = 0.2
"""For a loop that could not answer because the whole process was stopped."""


class LoopWatch:
    """Asks the loop every `limit_s`; dumps once each time that it is silent for so long."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._answered = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """From the loop or any other thread."""
        self._closing.set()
        self._answered.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._limit_s):
            self._answered.clear()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:  # the loop has been closed
                return
            if not self._answered.wait(self._limit_s) and not self._answered.wait(GRACE_S):
                dump_stacks(f"the front's event loop has not answered for {self._limit_s:g} s")
                self._answered.wait()
