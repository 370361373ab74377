"""A device that fails after a step was launched: waiting for the step's end is what tells.

On an accelerator a kernel's error comes with a later synchronization, belongs to no row and leaves the device unusable
for the process. On a CPU there is no such thing, so this stands for it.
"""

from __future__ import annotations

from support.faults.declared import lose_the_device

from mstar.engine.step_runner import StepWork
from mstar.platforms.executor import DeviceEvent, Work
from mstar.worker.worker import WorkerParts


class LostEvent(DeviceEvent):
    """Launched, and never seen to end."""

    __slots__ = ()

    def wait(self, timeout_s: float | None = None) -> bool:
        lose_the_device()
        return True

    def wait_launched(self, timeout_s: float | None = None) -> bool:
        return True


def lose_device_at(parts: WorkerParts, step: int) -> None:
    """The device fails in its `step`-th step from now on, counted from 0; every later one fails as well."""
    executor = parts.engine._executor
    submit, num_steps = executor.submit, 0

    def submit_to_it(work: Work) -> DeviceEvent:
        nonlocal num_steps
        if not isinstance(work, StepWork):
            return submit(work)
        num_steps += 1
        return submit(work) if num_steps <= step else LostEvent()

    executor.submit = submit_to_it
