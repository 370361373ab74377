"""Device executors: where a step's forward runs.

`InlineExecutor` runs work at once on the calling thread (CUDA launches are asynchronous; the plain CPU loop).
`ThreadedExecutor` runs it in order on one other thread, so that the loop plans the next step meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

Work = Callable[[], None]


class DeviceEvent:
    """Fires when the work it belongs to has ended. `error` is what the work raised; times are `time.monotonic_ns`.

    Work that is launched on a device goes on after its host part has returned; of work that blocks, as on a CPU, both
    end together. A bare lock, held until the event fires: waiting costs a third of what `threading.Event` takes.
    """

    __slots__ = ("_running", "began_ns", "ended_ns", "error")

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._running.acquire()
        self.began_ns = 0
        self.ended_ns = 0
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.ended_ns != 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Any number of threads, any number of times. False: the time is over."""
        if self.ended_ns:
            return True
        if not self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._running.release()
        return True

    def wait_launched(self, timeout_s: float | None = None) -> bool:
        """As `wait`, for the host part alone: what launching raised is in `error`."""
        return self.wait(timeout_s)

    def run(self, work: Work) -> None:
        """Run `work` and fire. An exception is kept in `error`: it belongs to the step, not to the executor."""
        self.began_ns = time.monotonic_ns()
        try:
            work()
        except BaseException as error:
            self.error = error
        self.ended_ns = time.monotonic_ns()
        self._running.release()


class DeviceExecutor(Protocol):
    """Runs submitted work in order."""

    overlaps: bool
    """Whether the caller goes on while work runs."""

    def submit(self, work: Work) -> DeviceEvent: ...
    def close(self) -> None: ...


class InlineExecutor:
    """Work has ended when `submit` returns."""

    overlaps = False

    def submit(self, work: Work) -> DeviceEvent:
        event = DeviceEvent()
        event.run(work)
        return event

    def close(self) -> None:
        """Nothing to end."""


class ThreadedExecutor:
    """One daemon thread with a FIFO queue. `prepare` runs on it first."""

    overlaps = True

    def __init__(self, prepare: Work | None = None) -> None:
        self._queue: queue.SimpleQueue[tuple[DeviceEvent, Work] | None] = queue.SimpleQueue()
        self._prepare = prepare
        self._thread = threading.Thread(target=self._run, name="device-executor", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> DeviceEvent:
        event = DeviceEvent()
        self._queue.put((event, work))
        return event

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (item := self._queue.get()) is not None:
            event, work = item
            event.run(work)
