"""`CudaExecutor`: launches work on the calling thread's stream and goes on at once. Loop thread.

A launch takes no longer on the loop thread than handing it to another thread, so there is none. Must not wait for the
device except where an event is waited for, and after work that failed halfway.
"""

from __future__ import annotations

import time

import torch

from mstar.platforms.executor import DeviceEvent, Work


class CudaEvent(DeviceEvent):
    """Fires when the device has done everything that the work launched. `ended_ns` is when the host noticed."""

    __slots__ = ("_fence",)

    def __init__(self) -> None:
        super().__init__()
        self._fence = torch.cuda.Event()

    def done(self) -> bool:
        if self.ended_ns:
            return True
        try:
            if not self._fence.query():
                return False
        except RuntimeError as error:  # the device failed in this step or an earlier one
            self.error = error
        self._end()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            while not self.done():
                if time.monotonic() >= deadline:
                    return False
            return True
        if not self.ended_ns:
            try:
                self._fence.synchronize()
            except RuntimeError as error:
                self.error = error
            self._end()
        return True

    def wait_launched(self, timeout_s: float | None = None) -> bool:
        return True

    def run(self, work: Work) -> None:
        self.began_ns = time.monotonic_ns()
        try:
            work()
            self._fence.record()
        except BaseException as error:
            self.error = error
            self._drain()
            self._end()

    def _drain(self) -> None:
        """What was launched before the work failed may still read the step's memory, which goes to another step now."""
        try:
            torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            self.error = error

    def _end(self) -> None:
        self.ended_ns = time.monotonic_ns()
        self._running.release()


class CudaExecutor:
    """Work has been launched when `submit` returns, in order, on the stream that is the calling thread's."""

    overlaps = True

    def submit(self, work: Work) -> CudaEvent:
        event = CudaEvent()
        event.run(work)
        return event

    def close(self) -> None:
        torch.cuda.synchronize()
