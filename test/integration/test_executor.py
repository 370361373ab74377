"""Launches on an accelerator: events fire when the device is through, and an error of the device ends the worker."""

import subprocess
import sys
import time

import torch

from mstar.engine.cuda_executor import CudaExecutor

ASSERT = """
import torch
from mstar.engine.cuda_executor import CudaExecutor
executor = CudaExecutor()
table, index = torch.zeros(4, device="cuda"), torch.tensor([7], device="cuda")
event = executor.submit(lambda: table[index].add_(1))
event.wait()
later = executor.submit(lambda: table.add_(1))
later.wait()
for each in (event, later):
    assert each.done() and isinstance(each.error, torch.AcceleratorError), repr(each.error)
print("ended")
"""


def test_an_event_fires_when_the_device_is_through():
    executor = CudaExecutor()
    executor.submit(lambda: None).wait()
    event = executor.submit(lambda: torch.cuda._sleep(200_000_000))
    begin = time.monotonic()
    assert event.wait_launched() and not event.done()
    assert not event.wait(timeout_s=0.001)
    assert event.wait() and event.done() and event.error is None
    assert time.monotonic() - begin > 0.02
    assert event.ended_ns > event.began_ns > 0


def test_an_error_of_the_device_is_the_steps():
    found = subprocess.run([sys.executable, "-c", ASSERT], capture_output=True, text=True, timeout=120, check=False)
    assert "ended" in found.stdout, found.stderr[-2000:]


def test_what_a_launch_raises_is_kept():
    executor = CudaExecutor()

    def fails() -> None:
        torch.cuda._sleep(1_000_000)
        raise ValueError("no")

    event = executor.submit(fails)
    assert event.done() and isinstance(event.error, ValueError)
