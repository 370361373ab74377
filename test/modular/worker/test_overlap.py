"""The async loop overlaps: what is planned and routed while the device runs, by timestamps; and what gets abandoned."""

import itertools
import time
from dataclasses import dataclass, field

import pytest
from support.instance import Instance, Tuning
from support.tiny_serving import TinyLlama

from mstar.engine.execution import Step, StepState
from mstar.profile.phases import PHASES
from mstar.worker.worker import Worker

FORWARD_S = 0.004
"""Long beside the host's work for a step, so that the order seen is the loop's and not the machine's."""


@dataclass
class Seen:
    """One step: its rows, and when its plan was done and its outputs had been routed (ns, monotonic)."""

    step: Step
    planned_ns: int
    routed_ns: int = 0


class TracedWorker(Worker):
    """Notes when stages end."""

    def __init__(self, parts, *, overlap: bool) -> None:
        super().__init__(parts, overlap=overlap, clock=self)  # pyright: ignore[reportArgumentType]
        self.overlap = overlap
        self.seen: list[Seen] = []
        self.marks: list[str] = []

    def preplan(self, step, cur):
        planned = super().preplan(step, cur)
        if planned is not None:
            self.seen.append(Seen(planned, time.monotonic_ns()))
        return planned

    def route(self, cur, nxt):
        super().route(cur, nxt)
        next(seen for seen in self.seen if seen.step is cur).routed_ns = time.monotonic_ns()

    def begin(self) -> None:
        self.marks.clear()

    def mark(self, phase: str) -> None:
        self.marks.append(phase)

    def end(self, step_ended: bool) -> None:
        """The plain loop submits before it waits; the overlapping one may look at the stops of an ended step early."""
        free = {"event_sync", "check_stop"} if self.overlap else {"await_gpu"}
        order = [PHASES.index(name) for name in self.marks if name not in free]
        assert order == sorted(order), f"stages ran in the order {self.marks}"


@dataclass
class Traced:
    instance: Instance
    worker: TracedWorker
    steps: list[Seen] = field(default_factory=list)


def traced(tiny: TinyLlama, *, overlap: bool = True) -> Traced:
    node = tiny.build_node()
    forward = node.forward_batched

    def slow(walk, inputs):
        time.sleep(FORWARD_S)
        return forward(walk, inputs)

    node.forward_batched = slow
    instance = tiny.instance(Tuning(threaded=True, poison=False), node)
    worker = TracedWorker(instance.parts[0], overlap=overlap)
    instance.workers[0] = worker
    return Traced(instance, worker)


def test_steady_decode_is_planned_and_routed_behind_the_device(tiny):
    run = traced(tiny)
    for index in range(8):
        tiny.submit(run.instance, f"r{index}", tiny.prompt(5, index), max_tokens=60)
    run.instance.run()
    steps = [seen for seen in run.worker.seen if seen.step.state is StepState.DONE]
    decode = steps[3:-1]
    assert len(decode) > 40
    assert {seen.step.num_rows for seen in decode} == {8}
    planned_ahead = sum(after.planned_ns < before.step.event.ended_ns for before, after in itertools.pairwise(decode))
    routed_behind = sum(before.routed_ns < after.step.event.ended_ns for before, after in itertools.pairwise(decode))
    assert planned_ahead >= 0.95 * (len(decode) - 1), "preplan(N+1) before the device ends N"
    assert routed_behind >= 0.95 * (len(decode) - 1), "route(N) before the device ends N+1"
    counters = run.instance.parts[0].counters
    assert counters.speculated > 0.9 * (counters.speculated + counters.fresh)
    run.instance.close()


def test_the_plain_loop_never_plans_ahead(tiny):
    run = traced(tiny, overlap=False)
    for index in range(3):
        tiny.submit(run.instance, f"r{index}", tiny.prompt(5, index), max_tokens=6)
    run.instance.run()
    steps = run.worker.seen
    for before, after in itertools.pairwise(steps):
        assert after.step.composed_ns >= before.routed_ns
    counters = run.instance.parts[0].counters
    assert (counters.speculated, counters.num_abandoned) == (0, 0)
    assert counters.fresh == len(steps) == 6
    assert counters.activity() == {
        'mstar_node_steps_total{node="LLM",walk="prefill"}': 1,
        'mstar_node_rows_total{node="LLM",walk="prefill"}': 3,
        'mstar_node_steps_total{node="LLM",walk="decode"}': 5,
        'mstar_node_rows_total{node="LLM",walk="decode"}': 15,
    }
    run.instance.close()


def test_a_step_whose_rows_have_all_stopped_is_abandoned(tiny):
    run = traced(tiny)
    prompt = tiny.prompt(7)
    expected = tiny.greedy(prompt, 12)
    stop = expected[5]
    length = expected.index(stop) + 1
    result = tiny.submit(run.instance, "r", prompt, max_tokens=40, stop_token_ids=(stop,))
    run.instance.run()
    assert result.tokens == expected[:length]
    assert result.reasons == {"text": "stop"}
    assert run.instance.parts[0].counters.num_abandoned == 1
    abandoned = [seen.step for seen in run.worker.seen if seen.step.state is StepState.ABANDONED]
    assert [step.num_rows for step in abandoned] == [1]
    run.instance.close()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_end_that_the_host_knows_is_never_speculated_past(tiny, max_tokens):
    run = traced(tiny)
    result = tiny.submit(run.instance, "r", tiny.prompt(4), max_tokens=max_tokens)
    run.instance.run()
    assert len(result.tokens) == max_tokens
    assert len(run.worker.seen) == max_tokens, "no step was armed for a token beyond the limit"
    run.instance.close()
