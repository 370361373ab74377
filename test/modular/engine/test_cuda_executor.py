"""The executor of an accelerator, over a device that a test plays: when its events fire, and whose errors are whose."""

from typing import Any

import pytest
import torch

from mstar.engine.cuda_executor import CudaExecutor


class Device:
    """`passed` fences are behind; `broken`: it answers every question with an error."""

    def __init__(self) -> None:
        self.passed = 0
        self.recorded = 0
        self.broken: RuntimeError | None = None
        self.waits: list[str] = []

    def ask(self) -> None:
        if self.broken is not None:
            raise self.broken

    def synchronize(self) -> None:
        self.waits.append("stream")
        self.ask()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    played = Device()

    class Fence:
        number = 0

        def record(self) -> None:
            played.recorded += 1
            self.number = played.recorded

        def query(self) -> bool:
            played.ask()
            return self.number <= played.passed

        def synchronize(self) -> None:
            played.waits.append("fence")
            played.ask()
            played.passed = max(played.passed, self.number)

    monkeypatch.setattr(torch.cuda, "Event", Fence)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: played)
    return played


def test_submit_launches_and_the_event_fires_later(device: Device):
    done: list[str] = []
    event = CudaExecutor().submit(lambda: done.append("launched"))
    assert done == ["launched"] and device.recorded == 1
    assert event.wait_launched() and not event.done() and not event.wait(timeout_s=0.002)
    assert device.waits == []
    device.passed = 1
    assert event.done() and event.error is None and event.ended_ns >= event.began_ns > 0
    assert event.wait() and device.waits == []  # nothing to wait for any more


def test_waiting_ends_with_the_device(device: Device):
    event = CudaExecutor().submit(lambda: None)
    assert event.wait() and device.waits == ["fence"] and event.done() and event.error is None


@pytest.mark.parametrize("ask", ["done", "wait"])
def test_an_error_of_the_device_is_kept_in_the_event(device: Device, ask: str):
    event = CudaExecutor().submit(lambda: None)
    device.broken = RuntimeError("device-side assert")
    answer: Any = getattr(event, ask)()
    assert answer and event.done() and event.error is device.broken


def test_work_that_fails_has_ended_when_the_device_has(device: Device):
    def fails() -> None:
        raise ValueError("no")

    event = CudaExecutor().submit(fails)
    assert device.waits == ["stream"] and device.recorded == 0
    assert event.done() and isinstance(event.error, ValueError) and event.wait()
