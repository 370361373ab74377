"""A device whose steps end long after they were launched: the order of stages, and the age of the step in flight.

That the outputs are the same, and that nothing is left behind, is in `test_lifecycle.py` and in the parity tests.
"""

import itertools
from dataclasses import dataclass

import pytest
from support.instance import Instance, Tuning
from support.tiny_serving import TinyLlama

from mstar.engine.execution import Step
from mstar.platforms.executor import DeviceEvent, ThreadedExecutor
from mstar.worker.worker import Worker


@dataclass
class Mark:
    """A stage that has ended. `in_flight`: steps submitted and not run. `since_ns`: what the heartbeat would see."""

    phase: str
    in_flight: int
    since_ns: int


class MarkedWorker(Worker):
    """Notes what is in flight when a stage ends."""

    def __init__(self, instance: Instance) -> None:
        [parts] = instance.parts
        super().__init__(parts, overlap=True, clock=self)  # pyright: ignore[reportArgumentType]
        self.age = parts.age
        self.ticks: list[list[Mark]] = []
        self.submitted: list[Step] = []
        instance.workers[0] = self

    def submit(self, step: Step, before: Step | None) -> None:
        super().submit(step, before)
        self.submitted.append(step)

    def begin(self) -> None:
        self.ticks.append([])

    def mark(self, phase: str) -> None:
        in_flight = sum(not step.event.done() for step in self.submitted if step.event is not None)
        self.ticks[-1].append(Mark(phase, in_flight, self.age.since_ns))

    def end(self, step_ended: bool) -> None:
        """Nothing more to note."""


@pytest.fixture
def late(tiny: TinyLlama) -> tuple[Instance, MarkedWorker]:
    instance = tiny.instance(Tuning(late=True))
    return instance, MarkedWorker(instance)


def test_the_host_waits_for_the_launch_first_and_for_the_end_after_the_next_submit(tiny, late):
    instance, worker = late
    prompt = tiny.prompt(5)
    result = tiny.submit(instance, "r", prompt, max_tokens=12)
    instance.run()
    assert result.tokens == tiny.greedy(prompt, 12)
    steady = [tick for tick in worker.ticks if [m.in_flight for m in tick if m.phase == "submit"] == [2]]
    assert len(steady) >= 8, "steps run one behind the other"
    for tick in steady:
        order = [mark.phase for mark in tick]
        assert order[4:] == ["await_gpu", "submit", "event_sync", "check_stop", "route"]
        assert [mark.in_flight for mark in tick] == [1, 1, 1, 1, 1, 2, 1, 1, 1]
    counters = instance.parts[0].counters
    assert (counters.speculated, counters.num_abandoned) == (len(steady), 0)
    instance.close()


def test_a_stop_shows_after_the_submit_and_its_row_is_dropped(tiny, late):
    instance, worker = late
    prompts = [tiny.prompt(5, index) for index in range(2)]
    expected = [tiny.greedy(prompt, 14) for prompt in prompts]
    stop = expected[0][6]
    length = expected[0].index(stop) + 1
    stopped = tiny.submit(instance, "stopped", prompts[0], max_tokens=14, stop_token_ids=(stop,))
    other = tiny.submit(instance, "other", prompts[1], max_tokens=14)
    instance.run()
    assert (stopped.tokens, stopped.reasons) == (expected[0][:length], {"text": "stop"})
    assert other.tokens == expected[1]
    assert any(step.dropped for step in worker.submitted), "one step ran for a row that had stopped"
    instance.close()


def test_the_age_is_that_of_the_step_on_the_device(tiny, late):
    """The step behind it waits for its turn: its age begins when the one before has ended."""
    instance, worker = late
    tiny.submit(instance, "r", tiny.prompt(5), max_tokens=6)
    instance.run()
    seen: list[tuple[int, int]] = []
    for tick in worker.ticks:
        at = {mark.phase: mark.since_ns for mark in tick}
        if "submit" in at and "await_gpu" in at:
            assert at["submit"] == at["await_gpu"] > 0, "a submit behind a running step does not hide its age"
            assert at["event_sync"] > at["submit"], "the step behind is the one in flight now"
            seen.append((at["submit"], at["event_sync"]))
    assert len(seen) >= 3
    assert all(after[0] == before[1] for before, after in itertools.pairwise(seen))
    assert worker.age.since_ns == 0, "between steps there is no age"
    instance.close()


def test_the_age_of_a_step_that_was_submitted_after_the_last_one_ended(tiny):
    instance = tiny.instance(Tuning(threaded=True))
    worker = MarkedWorker(instance)
    tiny.submit(instance, "r", tiny.prompt(5), max_tokens=6)
    instance.run()
    submits = [mark.since_ns for tick in worker.ticks for mark in tick if mark.phase == "submit"]
    assert submits == [step.submitted_ns for step in worker.submitted]
    assert worker.age.since_ns == 0
    instance.close()


def test_a_launch_that_blocks_has_ended_when_it_returns():
    executor = ThreadedExecutor()
    event: DeviceEvent = executor.submit(lambda: None)
    assert event.wait_launched(10)
    assert event.done()
    executor.close()
