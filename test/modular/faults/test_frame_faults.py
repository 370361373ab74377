"""Frames that are lost, frames that are late, tensors that cannot be fetched, between the workers of one instance."""

import random
from functools import partial

import pytest
from support.composite.declarations import CODEC, ENCODER, LLM
from support.composite.deployment import PLACEMENTS, Composite, make_requests
from support.faults.fetch_faults import missing_files, truncated_files
from support.faults.frame_faults import FrameFaults, LostFrame
from support.faults.instance_faults import InstanceFaults, settle
from support.instance import Instance, Tuning

from mstar.communication.messages import EdgeFrame, EmitFrame, Open, Opened, StartWalk, StreamFrame, WalkDone

REQUESTS = make_requests(5, seed=7)
TUNINGS = {"on": Tuning(), "off": Tuning(overlap=False), "late": Tuning(late=True)}
THREE = PLACEMENTS["three_workers"]


@pytest.fixture(params=["on", "off"])
def instance(composite: Composite, request: pytest.FixtureRequest):
    made = composite.instance("three_workers", TUNINGS[request.param])
    made.run()  # the workers meet
    yield made
    made.close()


def submit_all(composite: Composite, instance: Instance) -> None:
    """One after the other, so that frames do not carry all of them."""
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"r{index}", request)
        for _ in range(2):
            instance.tick()


def all_done(instance: Instance) -> bool:
    return all(result.done for result in instance.results.values())


def check_others(composite: Composite, instance: Instance, but: set[str]) -> None:
    for index, request in enumerate(REQUESTS):
        if f"r{index}" not in but:
            composite.check(instance, f"r{index}", request)


def finish(composite: Composite, instance: Instance, faults: InstanceFaults) -> None:
    """A further request is right; afterwards nothing is held anywhere."""
    composite.submit(instance, "after", REQUESTS[2])
    instance.run()
    composite.check(instance, "after", REQUESTS[2])
    settle(instance)
    faults.assert_baseline()


LOSSES = {
    "open": LostFrame(Open, rid="r2"),
    "open of the last worker": LostFrame(Open, rid="r2", receiver="w2"),
    "opened": LostFrame(Opened, rid="r2", after=1),
    "start": LostFrame(StartWalk, rid="r2"),
    "start of the codec": LostFrame(StartWalk, rid="r2", receiver="w2"),
    "edges": LostFrame(EdgeFrame, rid="r2"),
    "edges back": LostFrame(EdgeFrame, rid="r2", sender="w1"),
    "stream items": LostFrame(StreamFrame, rid="r2", after=1),
    "end of a stream": LostFrame(StreamFrame, rid="r2", after=4, times=99),
    "first token": LostFrame(EmitFrame, rid="r2"),
    "later token": LostFrame(EmitFrame, rid="r2", after=2),
    "report": LostFrame(WalkDone, rid="r2"),
    "report of the codec": LostFrame(WalkDone, rid="r2", sender="w2"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_frame_leaves_its_requests_to_their_deadline(composite: Composite, instance: Instance, name: str):
    """Everybody else goes on to the end; nobody spins; the deadline frees everything on every worker."""
    like = LOSSES[name]
    faults, frames = InstanceFaults(instance), FrameFaults(instance)
    loss = frames.lose(LostFrame(like.kind, like.rid, like.after, like.times, like.sender, like.receiver))
    submit_all(composite, instance)
    settle(instance)
    assert loss.lost, "nothing was lost"
    assert "r2" in loss.rids
    check_others(composite, instance, loss.rids)
    result = instance.results["r2"]
    assert not result.done
    expected = composite.expected(REQUESTS[2]).tokens
    assert result.tokens == expected[: len(result.tokens)] or like.kind is EmitFrame
    for rid in loss.rids:  # as the front does when a request's time is over
        if not instance.results[rid].done:
            instance.abort(rid)
    settle(instance)
    frames.clear()
    finish(composite, instance, faults)


@pytest.mark.parametrize("placement", ["three_workers", "ends_apart", "three_workers_encoder_alone"])
@pytest.mark.parametrize("seed", range(3))
def test_late_frames_change_nothing(composite: Composite, placement: str, seed: int):
    """Of different peers they arrive in any order: what waits for a walk, a handle or a stream's end finds it."""
    instance = composite.instance(placement, list(TUNINGS.values())[seed])
    faults, frames = InstanceFaults(instance), FrameFaults(instance)
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"r{index}", request)
    overtaken = frames.run_late(random.Random(seed), partial(all_done, instance))
    assert overtaken > 10, "the order was that of sending"
    instance.run()
    check_others(composite, instance, set())
    settle(instance)
    faults.assert_baseline()
    instance.close()


@pytest.mark.parametrize("seed", range(4))
def test_aborts_among_late_frames(composite: Composite, seed: int):
    """What still travels for a request that has left is dropped wherever it arrives."""
    rng = random.Random(seed)
    instance = composite.instance("three_workers", list(TUNINGS.values())[seed % 3])
    faults, frames = InstanceFaults(instance), FrameFaults(instance)
    leaving = rng.sample([f"r{index}" for index in range(len(REQUESTS))], 2)
    num_ticks = {rid: rng.randint(5, 120) for rid in leaving}
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"r{index}", request)
    ticks = 0

    def is_over() -> bool:
        nonlocal ticks
        ticks += 1
        for rid in leaving:
            if ticks == num_ticks[rid] and not instance.results[rid].done:
                instance.abort(rid)
        return ticks > max(num_ticks.values()) and all_done(instance)

    frames.run_late(rng, is_over)
    instance.run()
    check_others(composite, instance, set(leaving))
    finish(composite, instance, faults)
    instance.close()


@pytest.mark.parametrize("how", ["missing", "truncated"])
@pytest.mark.parametrize("node", [ENCODER, LLM])
def test_a_tensor_that_cannot_be_fetched_fails_its_requests(
    composite: Composite, instance: Instance, node: str, how: str
):
    """The sender's file is gone, or shorter than the frame says; its requests fail on every worker, and others, whose
    frames come when it is back, do not."""
    faults = InstanceFaults(instance)
    sender = THREE[node]
    context = missing_files(instance, sender) if how == "missing" else truncated_files(instance, sender, 64)
    with context:
        composite.submit(instance, "r2", REQUESTS[2])
        for _ in range(2000):
            if instance.results["r2"].done:
                break
            instance.tick()
        settle(instance)
    why = instance.results["r2"].failure or ""
    assert f"a value from w{sender} was lost" in why
    assert ("cannot be read" if how == "missing" else "which has 64") in why
    faults.assert_baseline()
    for index, request in enumerate(REQUESTS):
        if index != 2:
            composite.submit(instance, f"r{index}", request)
    instance.run()
    check_others(composite, instance, {"r2"})
    finish(composite, instance, faults)


def test_the_codec_is_where_streams_end():
    """What the parameters above take for granted of the placement."""
    assert (THREE[ENCODER], THREE[LLM], THREE[CODEC]) == (0, 1, 2)
