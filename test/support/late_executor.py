"""A device whose launches return at once and whose work runs as late as it may: when somebody waits for its end.

It stands for an accelerator: the host part of a step and its end on the device are different moments, and what the loop
plans, overwrites or submits in between is there before the step's work looks at it. One thread and no clock.
"""

from __future__ import annotations

from collections import deque

from mstar.platforms.executor import DeviceEvent, Work


class LateEvent(DeviceEvent):
    """Launched at once. `wait` makes the device work up to here."""

    __slots__ = ("_executor",)

    def __init__(self, executor: LateExecutor) -> None:
        super().__init__()
        self._executor = executor

    def wait(self, timeout_s: float | None = None) -> bool:
        self._executor.work_until(self)
        return True

    def wait_launched(self, timeout_s: float | None = None) -> bool:
        return True


class LateExecutor:
    """Runs submitted work in order."""

    overlaps = True

    def __init__(self) -> None:
        self._queue: deque[tuple[LateEvent, Work]] = deque()
        self.most_in_flight = 0
        """Steps submitted and not run, at most, so far."""

    def submit(self, work: Work) -> DeviceEvent:
        event = LateEvent(self)
        self._queue.append((event, work))
        self.most_in_flight = max(self.most_in_flight, len(self._queue))
        return event

    def work_until(self, event: DeviceEvent) -> None:
        while not event.done():
            launched, work = self._queue.popleft()
            launched.run(work)

    def close(self) -> None:
        """The device finishes what it was given."""
        while self._queue:
            launched, work = self._queue.popleft()
            launched.run(work)
