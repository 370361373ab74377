"""The ledger: what workers say becomes events, and every request ends once, whatever the order of messages."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.composite.declarations import AUDIO, MAIN
from support.composite.deployment import CONFIG, PLACEMENTS
from support.composite.model import CompositeModel
from support.conductor_rig import ConductorRig
from support.stepwise_model import PLACEMENT, StepwiseModel

from mstar.communication.messages import (
    EmitFrame,
    Fail,
    HostTensor,
    Open,
    Opened,
    Remove,
    Shutdown,
    StartWalk,
    Stop,
    TokenLogprobs,
    WalkDone,
)
from mstar.conductor.events import ABORTED, Failure, FinishedEvent, TensorEvent, TokenEvent
from mstar.model.base import ModelSetup

TENSOR = HostTensor("float32", (1,), b"\0\0\0\0")


def composite_rig(placement: str) -> ConductorRig:
    rig = ConductorRig(CompositeModel(ModelSetup(CONFIG, None, 64)), PLACEMENTS[placement])
    rig.bring_up()
    return rig


def assert_idle(rig: ConductorRig) -> None:
    assert len(rig.conductor.requests) == 0
    assert rig.conductor.num_waiting == 0


@pytest.fixture
def rig() -> ConductorRig:
    return composite_rig("one_worker")


def test_tokens_and_tensors_come_as_events_in_order(rig: ConductorRig):
    stream = rig.submit()
    entry = TokenLogprobs(-0.5, (7, 8), (-0.5, -1.0))
    rig.say(
        EmitFrame(
            src=0,
            rids=["r0", "r0"],
            signals=["token"],
            tokens=[7, 9],
            logprobs=[entry, None],
            tensor_rids=["r0"],
            tensor_signals=["audio"],
            tensors=[TENSOR],
        )
    )
    assert rig.events(stream) == [
        TokenEvent(0, "token", 7, entry),
        TokenEvent(0, "token", 9, None),
        TensorEvent(0, "audio", TENSOR),
    ]


def test_rows_of_different_signals_share_a_frame(rig: ConductorRig):
    streams = [rig.submit(), rig.submit()]
    rig.say(EmitFrame(src=0, rids=["r0", "gone", "r1"], signals=["token", "token", "code"], tokens=[1, 2, 3]))
    assert [rig.events(stream) for stream in streams] == [
        [TokenEvent(0, "token", 1, None)],
        [TokenEvent(0, "code", 3, None)],
    ]


def test_a_request_ends_when_all_partitions_are_done_and_all_emits_are_here(rig: ConductorRig):
    stream = rig.submit()
    rig.sent()
    rig.emit("r0")
    rig.done("r0", MAIN, {"token": 2}, reason="stop")
    rig.done("r0", AUDIO, {"token": 2, "audio": 1})
    assert not any(isinstance(event, FinishedEvent) for event in rig.events(stream)), "one token and the audio miss"
    rig.emit("r0")
    assert rig.sent() == []
    rig.say(
        EmitFrame(
            src=0,
            rids=[],
            signals=[],
            tokens=[],
            tensor_rids=["r0"],
            tensor_signals=["audio"],
            tensors=[TENSOR],
        )
    )
    assert rig.events(stream)[-1] == FinishedEvent(0, "stop", 5, 0)
    assert rig.sent() == [Remove("r0")]
    assert stream.num_open == 0
    assert_idle(rig)


def test_the_reason_is_that_of_the_text_partition(rig: ConductorRig):
    stream = rig.submit()
    rig.done("r0", AUDIO, {}, reason="stop")
    rig.done("r0", MAIN, {}, reason="length")
    assert rig.events(stream) == [FinishedEvent(0, "length", 5, 0)]


def test_one_request_costs_each_worker_one_start_and_one_remove():
    rig = ConductorRig(CompositeModel(ModelSetup(CONFIG, None, 64)), PLACEMENTS["one_worker"])
    rig.bring_up()
    rig.submit(num_choices=3)
    assert [type(m) for m in rig.sent()] == [StartWalk] * 6, "two partitions for each choice"
    rig.emit("r0", "r1", "r2")
    assert rig.sent() == [], "a streamed token sends nothing"
    for rid in ("r0", "r1", "r2"):
        rig.done(rid, AUDIO, {})
        rig.done(rid, MAIN, {"token": 1})
    assert rig.sent() == [Remove("r0"), Remove("r1"), Remove("r2")]


def test_workers_are_opened_in_rank_order_before_any_walk_starts():
    rig = composite_rig("three_workers")
    rig.submit()
    assert [type(m) for m in rig.sent(0)] == [Open]
    assert rig.sent(1) == rig.sent(2) == []
    rig.say(Opened(rid="r0", rank=2))
    assert rig.sent(1) == rig.sent(2) == [], "an answer out of turn is none"
    rig.say(Opened(rid="r0", rank=0))
    assert [type(m) for m in rig.sent(1)] == [Open]
    rig.say(Opened(rid="r0", rank=1))
    rig.say(Opened(rid="r0", rank=2))
    assert [type(m) for m in rig.sent(2)] == [Open, StartWalk]
    assert [(type(m), m.open) for m in rig.sent(0)] == [(StartWalk, None)]


def test_only_workers_that_were_told_of_a_request_are_told_to_forget_it():
    rig = composite_rig("three_workers")
    stream = rig.submit()
    rig.say(Opened(rid="r0", rank=0))
    for rank in range(3):
        rig.sent(rank)
    rig.conductor.fail(stream, ABORTED)
    rig.conductor.flush()
    assert [rig.sent(rank) for rank in range(3)] == [[Remove("r0")], [Remove("r0")], []]
    rig.say(Opened(rid="r0", rank=1))
    assert rig.sent(2) == []


def test_a_walk_ends_when_every_worker_of_the_partition_says_so():
    rig = ConductorRig(StepwiseModel(ModelSetup({}, None, 64)), PLACEMENT)
    rig.bring_up()
    stream = rig.submit()
    rig.say(Opened(rid="r0", rank=0))
    rig.say(Opened(rid="r0", rank=1))
    assert [m.walks for m in rig.sent(1)[1:]] == [("think",)]
    rig.done("r0", "main", {}, rank=0)
    rig.done("r0", "main", {}, rank=0)
    assert rig.sent(1) == [], "the same worker twice is not two workers"
    rig.done("r0", "main", {}, rank=1)
    assert [m.walks for m in rig.sent(1)] == [("speak",)]
    rig.emit("r0", src=1, signal="word")
    rig.done("r0", "main", {}, rank=0, reason="length")
    rig.done("r0", "main", {"word": 1}, rank=1, reason="stop")
    assert rig.events(stream)[-1] == FinishedEvent(0, "stop", 5, 0)
    assert_idle(rig)


def test_stop_drops_further_text_but_counts_it(rig: ConductorRig):
    stream = rig.submit()
    rig.emit("r0", token=1)
    rig.sent()
    rig.conductor.stop(stream, 0)
    rig.conductor.stop(stream, 0)
    assert rig.sent() == [Stop("r0", MAIN)]
    rig.emit("r0", token=2)
    rig.done("r0", AUDIO, {})
    rig.done("r0", MAIN, {"token": 2}, reason="length")
    assert rig.events(stream) == [TokenEvent(0, "token", 1, None), FinishedEvent(0, "stop", 5, 0)]
    assert_idle(rig)


def test_a_failed_choice_fails_its_request_and_no_other(rig: ConductorRig):
    stream, other = rig.submit(num_choices=2), rig.submit()
    rig.sent()
    rig.say(Fail("r1", "NaN in the logits", 500))
    assert rig.events(stream) == [Failure(500, "request_failed", "NaN in the logits")]
    assert rig.sent() == [Remove("r0"), Remove("r1")]
    assert stream.num_open == 0 and other.num_open == 1
    rig.say(Fail("r0", "late", 500))
    rig.emit("r0", "r1", "r2")
    assert rig.events(stream) == []
    assert rig.events(other) == [TokenEvent(0, "token", 7, None)]


def test_a_refusal_by_the_worker_keeps_its_status(rig: ConductorRig):
    stream = rig.submit()
    rig.say(Fail("r0", "needs room for 900 tokens", 400))
    assert rig.events(stream) == [Failure(400, "request_refused", "needs room for 900 tokens")]


def test_walk_done_with_an_error_fails_the_request(rig: ConductorRig):
    stream = rig.submit()
    rig.done("r0", MAIN, {}, reason="error")
    (failure,) = rig.events(stream)
    assert failure.status == 500
    assert_idle(rig)


def test_a_handler_that_fails_takes_only_the_requests_of_its_message(rig: ConductorRig, monkeypatch):
    victim, other = rig.submit(), rig.submit()

    def broken(*_: object) -> list:
        raise RuntimeError("a bug in a model's next_walk")

    monkeypatch.setattr(rig.walks, "advance", broken)
    frame = EmitFrame(src=0, rids=["r1"], signals=["token"], tokens=[3])
    rig.say(WalkDone(rid="r0", partition=MAIN, rank=0, reason="stop", emits={}), frame)
    assert [event.status for event in rig.events(victim)] == [500]
    assert rig.events(other) == [TokenEvent(0, "token", 3, None)]


def test_unknown_requests_are_no_error(rig: ConductorRig):
    rig.emit("nobody")
    rig.done("nobody", MAIN, {})
    rig.say(Fail("nobody", "", 500), Opened(rid="nobody", rank=0))
    assert rig.sent() == []


def test_the_supervisor_can_ask_for_a_drain(rig: ConductorRig):
    rig.say(Shutdown())
    assert rig.num_shutdowns == 1


def test_a_stream_is_woken_once_per_pass(rig: ConductorRig, monkeypatch):
    stream = rig.submit()
    wakes = []
    monkeypatch.setattr(rig.conductor, "_dirty", wakes)
    frame = EmitFrame(src=0, rids=["r0", "r0"], signals=["token"], tokens=[1, 2])
    rig.conductor._on_emit(frame)
    rig.conductor._on_emit(frame)
    assert wakes == [stream]


def test_a_sink_takes_events_in_place_of_a_task(rig: ConductorRig):
    stream, other = rig.submit(), rig.submit()
    taken: list[object] = []

    def sink() -> bool:
        if not stream.has_only_tokens():
            return False
        taken.extend(stream.take_now())
        return True

    stream.sink = sink
    rig.emit("r0", "r1")
    assert taken == [TokenEvent(0, "token", 7, None)]
    rig.done("r0", MAIN, {"token": 1})
    rig.done("r0", AUDIO, {})
    assert [type(event) for event in rig.events(stream)] == [FinishedEvent], "left for the task"
    assert rig.events(other) == [TokenEvent(0, "token", 7, None)]


def test_a_sink_that_fails_fails_its_request_only(rig: ConductorRig):
    stream, other = rig.submit(), rig.submit()

    def sink() -> bool:
        if not stream.has_only_tokens():
            return False
        raise RuntimeError("a bug in writing")

    stream.sink = sink
    rig.emit("r0", "r1")
    assert [event.status for event in rig.events(stream) if isinstance(event, Failure)] == [500]
    assert rig.events(other) == [TokenEvent(0, "token", 7, None)]
    assert Remove("r0") in rig.sent()


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.sampled_from(["one_worker", "three_workers"]))
def test_whatever_the_order_every_request_ends_once_and_is_forgotten(
    rng: random.Random, num_requests: int, placement: str
):
    """A random interleaving of what workers may say: emits, ends of partitions, failures, aborts, a worker's death."""
    rig = composite_rig(placement)
    streams = [rig.submit(num_choices=rng.randint(1, 3)) for _ in range(num_requests)]
    script = []
    for record in list(rig.conductor.requests):
        script += [("opened", record.rid, rank) for rank in record.ranks]
        counts = {rank: rng.randint(0, 3) for rank in record.ranks}
        for rank, count in counts.items():
            script += [("emit", record.rid, rank)] * count
        for name, progress in record.partitions.items():
            script += [("done", record.rid, rank, name, counts[rank]) for rank in progress.waiting]
    script += [("fail", rng.choice(streams)), ("abort", rng.choice(streams))][: rng.randint(0, 2)]
    rng.shuffle(script)
    ends: dict[int, list[object]] = {index: [] for index in range(num_requests)}
    for kind, *rest in script:
        match kind:
            case "opened":
                rig.say(Opened(rid=rest[0], rank=rest[1]))
            case "emit":
                rig.emit(rest[0], src=rest[1])
            case "done":
                rid, rank, name, count = rest
                rig.done(rid, name, {"token": count}, rank=rank)
            case "fail":
                rig.say(Fail(rest[0].rids[0], "", 500))
            case "abort":
                rig.conductor.fail(rest[0], ABORTED)
                rig.conductor.flush()
        for index, stream in enumerate(streams):
            ends[index] += [event for event in rig.events(stream) if isinstance(event, FinishedEvent | Failure)]
    for index, stream in enumerate(streams):
        assert stream.num_open == 0
        failures = [event for event in ends[index] if isinstance(event, Failure)]
        finished = [event.choice for event in ends[index] if isinstance(event, FinishedEvent)]
        assert len(set(finished)) == len(finished)
        if failures:
            assert len(failures) == 1 and isinstance(ends[index][-1], Failure)
        else:
            assert sorted(finished) == list(range(stream.request.num_choices))
    assert_idle(rig)
    num_choices = sum(stream.request.num_choices for stream in streams)
    for rank in rig.walks.all_ranks:
        messages = rig.sent(rank)
        removed = [m.rid for m in messages if isinstance(m, Remove)]
        told = {m.rid for m in messages if isinstance(m, Open | StartWalk)}
        assert sorted(removed) == sorted(told), "each request that a worker knows of is removed there exactly once"
        assert len(removed) <= num_choices
    assert sum(rig.conductor.statistics.outcomes.values()) == num_choices
