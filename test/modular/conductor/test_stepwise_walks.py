"""Walks that the front decides one after the other, from the conductor to the outputs of real workers."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.conducted_instance import ConductedInstance
from support.instance import Tuning, shared_memory_of
from support.stepwise_model import PLACEMENT, SINGING_PLACEMENT, SingingModel, StepwiseModel
from support.stepwise_nodes import build_submodule, words_of

from mstar.conductor.events import ABORTED
from mstar.model.base import Done, ModelSetup, PartitionState, PreparedPrompt, WalkStep

SETUP = ModelSetup({}, None, 64)
TOGETHER = dict.fromkeys(PLACEMENT, 0)
TUNINGS = {"plain": Tuning(overlap=False), "overlap": Tuning(), "late": Tuning(late=True)}


def prompt(topic: int, thoughts: int, words: int) -> PreparedPrompt:
    inputs = {"topic": np.array([topic], np.float32)}
    return PreparedPrompt(None, inputs, {"thoughts": thoughts, "words": words})


@pytest.fixture(params=list(TUNINGS))
def tuning(request: pytest.FixtureRequest) -> Tuning:
    return TUNINGS[request.param]


def _started(model: StepwiseModel, placement: dict[str, int], tuning: Tuning) -> Iterator[ConductedInstance]:
    made = ConductedInstance(model, build_submodule, placement, tuning)
    baseline = [dict(made.instance.gauges(rank)) for rank in range(len(made.instance.workers))]
    yield made
    assert [made.instance.gauges(rank) for rank in range(len(made.instance.workers))] == baseline
    made.close()
    assert shared_memory_of(made.instance.name) == []


@pytest.fixture(params=["one worker", "two workers"])
def talking(request: pytest.FixtureRequest, tuning: Tuning) -> Iterator[ConductedInstance]:
    yield from _started(StepwiseModel(SETUP), TOGETHER if request.param == "one worker" else PLACEMENT, tuning)


@pytest.fixture
def singing(tuning: Tuning) -> Iterator[ConductedInstance]:
    yield from _started(SingingModel(SETUP), SINGING_PLACEMENT, tuning)


def test_two_steps_and_their_loop_limit(talking: ConductedInstance) -> None:
    heard = talking.submit("r", prompt(topic=7, thoughts=1, words=3))
    talking.run()
    assert heard.values == {"word": [1070, 1071, 1072]}
    assert (heard.finish, heard.failure) == ("length", None)


def test_requests_with_schedules_of_their_own(talking: ConductedInstance) -> None:
    cases = {f"r{i}": (topic, i % 4, 1 + i % 3) for i, topic in enumerate([5, 2, 9, 4, 3, 8, 1])}
    for rid, (topic, thoughts, words) in cases.items():
        # Without a thought there is nothing to speak of: the model is asked for one at least.
        talking.submit(rid, prompt(topic, max(1, thoughts), words))
    talking.run()
    for rid, (topic, thoughts, words) in cases.items():
        assert talking.heard[rid].values["word"] == words_of(topic, max(1, thoughts), words), rid
    assert max(len(step.rows) for step in talking.instance.steps) > 1


def test_a_loop_with_limit_0_is_skipped(talking: ConductedInstance) -> None:
    heard = talking.submit("r", prompt(topic=7, thoughts=2, words=0))
    talking.run()
    assert (heard.values, heard.finish) == ({}, "length")


@pytest.mark.parametrize("words", [1, 2, 5])
def test_streams_end_when_the_model_is_done(singing: ConductedInstance, words: int) -> None:
    """An odd number of words leaves one that is sung only once the end is known."""
    heard = singing.submit("r", prompt(topic=7, thoughts=1, words=words))
    singing.run()
    said = words_of(7, 1, words)
    assert heard.values == {"word": said, "song": [sum(said[i : i + 2]) for i in range(0, words, 2)]}


def test_an_abort_between_two_walks_leaves_nothing(talking: ConductedInstance) -> None:
    heard = talking.submit("r", prompt(topic=7, thoughts=30, words=2))
    other = talking.submit("other", prompt(topic=2, thoughts=3, words=2))
    for _ in range(12):
        talking.tick()
    talking.conductor.fail(heard.stream, ABORTED)
    talking.conductor.flush()
    talking.run()
    assert heard.failure is ABORTED
    assert other.values["word"] == words_of(2, 3, 2)


class ForgetfulModel(StepwiseModel):
    """Names a walk without the limit of its loop, when the topic is not known."""

    def next_walk(self, partition: str, state: PartitionState) -> WalkStep | Done:
        step = super().next_walk(partition, state)
        return WalkStep(step.walk) if isinstance(step, WalkStep) and "forget" in state.step_metadata else step


def test_a_missing_limit_fails_its_request_alone(tuning: Tuning) -> None:
    conducted = ConductedInstance(ForgetfulModel(SETUP), build_submodule, PLACEMENT, tuning)
    bad = conducted.submit("bad", PreparedPrompt(None, {}, {"forget": True}))
    good = conducted.submit("good", prompt(topic=3, thoughts=2, words=2))
    conducted.run()
    assert bad.failure is not None and bad.failure.status == 500
    assert good.values["word"] == words_of(3, 2, 2)
    conducted.close()
