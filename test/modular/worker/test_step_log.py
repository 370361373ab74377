"""The last steps of a worker: what ran when, for whom, and no more of it than fits."""

import time

import pytest
from support.instance import Instance, Tuning
from support.tiny_serving import TinyLlama

from mstar.communication.address import peer_name
from mstar.communication.messages import AskSteps, StepReport
from mstar.worker import step_log


def report(instance: Instance, since_ns: int = 0) -> StepReport:
    return instance.parts[0].step_log.report(AskSteps(ask=7, since_ns=since_ns))


def rows_of(steps: StepReport) -> list[tuple[int, str, tuple[str, ...], int]]:
    """(step, walk, ids, tokens) of every part."""
    parts, begin = [], 0
    for step, walk, count, tokens in zip(
        steps.part_steps, steps.walks, steps.part_rows, steps.part_tokens, strict=True
    ):
        parts.append((step, walk, tuple(steps.rids[row] for row in steps.rows[begin : begin + count]), tokens))
        begin += count
    assert begin == len(steps.rows)
    return parts


@pytest.mark.parametrize("tuning", [Tuning(overlap=False), Tuning(threaded=True)], ids=["plain", "threaded"])
def test_every_step_is_told_with_its_rows_and_tokens(tiny: TinyLlama, tuning: Tuning):
    instance = tiny.instance(tuning)
    began = time.monotonic_ns()
    tiny.submit(instance, "a", tiny.prompt(20), max_tokens=5)
    tiny.submit(instance, "b", tiny.prompt(30), max_tokens=9)
    instance.run()
    steps = report(instance)
    assert (steps.ask, steps.rank, set(steps.nodes)) == (7, 0, {"LLM"})
    assert len(steps.nodes) == len(instance.steps)
    parts = rows_of(steps)
    assert [walk for _, walk, _, _ in parts] == [walk for step in instance.steps for walk in step.walks]
    # The last token of each is drawn and never computed.
    assert sum(tokens for *_, tokens in parts) == 20 + 4 + 30 + 8
    assert sum(tokens for _, walk, _, tokens in parts if walk == "prefill") == 50
    assert sum("a" in ids for _, _, ids, _ in parts) == 5 and sum("b" in ids for _, _, ids, _ in parts) == 9
    columns = zip(steps.composed_ns, steps.submitted_ns, steps.began_ns, steps.ended_ns, strict=True)
    for composed, submitted, begin, end in columns:
        assert began <= composed <= submitted <= begin <= end <= time.monotonic_ns()
    assert steps.ended_ns == sorted(steps.ended_ns)
    instance.close()


def test_only_what_ended_later_is_told(tiny: TinyLlama):
    instance = tiny.instance(Tuning())
    tiny.submit(instance, "a", tiny.prompt(20), max_tokens=5)
    instance.run()
    between = time.monotonic_ns()
    tiny.submit(instance, "b", tiny.prompt(30), max_tokens=3)
    instance.run()
    assert report(instance, between).rids == ["b"] and len(report(instance, between).nodes) == 3
    assert report(instance, time.monotonic_ns()).nodes == []
    assert report(instance).rids == ["a", "b"]
    instance.close()


@pytest.mark.parametrize(("name", "limit"), [("MAX_STEPS", 4), ("MAX_ROWS", 8)])
def test_the_oldest_steps_go(tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch, name: str, limit: int):
    monkeypatch.setattr(step_log, name, limit)
    instance = tiny.instance(Tuning(overlap=False))
    for rid in ("a", "b"):
        tiny.submit(instance, rid, tiny.prompt(20, ord(rid)), max_tokens=12)
    instance.run()
    steps = report(instance)
    assert len(steps.nodes) == 4 and steps.part_rows == [2] * 4  # both rows in each
    instance.close()


def test_a_worker_answers_who_asks(tiny: TinyLlama):
    instance = tiny.instance(Tuning())
    tiny.submit(instance, "a", tiny.prompt(20), max_tokens=2)
    instance.run()
    instance.front.send(peer_name(0), [AskSteps(ask=3, since_ns=0)])
    instance.workers[0].tick_once()
    (answer,) = instance.front.receive()
    assert isinstance(answer, StepReport) and (answer.ask, answer.rids) == (3, ["a"])
    instance.close()
