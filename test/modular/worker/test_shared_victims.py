"""Victims that share pages with each other, or with the request that asks for their room: what preempting them gives is
known before any is preempted, so nobody loses its cache in vain and nobody waits for room that is there."""

import numpy as np
import pytest
from support.instance import Tuning
from support.tiny_serving import TinyLlama

from mstar.engine.execution import AdmitOutcome
from mstar.model.base import PreparedPrompt

PAGE = 4
TUNINGS = {"plain": Tuning(overlap=False), "overlap": Tuning(), "late": Tuning(late=True)}


@pytest.fixture(params=list(TUNINGS))
def tuning(request: pytest.FixtureRequest) -> Tuning:
    return TUNINGS[request.param]


def ids(tiny: TinyLlama, length: int, seed: int) -> np.ndarray:
    """The first tokens of a text."""
    whole = tiny.prompt(64, seed).token_ids
    assert whole is not None
    return whole[:length]


def test_nobody_is_preempted_for_one_that_needs_the_very_pages_they_share(tiny: TinyLlama, tuning: Tuning):
    """Without the junior there are four pages more, three of which the one in line would adopt: too few for it."""
    instance = tiny.instance(Tuning(**{**vars(tuning), "num_pages": {"kv": 8}}), page_size=PAGE)
    prompts = {
        "junior": PreparedPrompt(ids(tiny, 13, 0)),
        "senior": PreparedPrompt(ids(tiny, 12, 1)),
        "in line": PreparedPrompt(np.concatenate([ids(tiny, 12, 0), ids(tiny, 9, 2)])),
    }
    tiny.submit(instance, "junior", prompts["junior"], max_tokens=3, priority=2)
    tiny.submit(instance, "senior", prompts["senior"], max_tokens=4)
    instance.tick()
    tiny.submit(instance, "in line", prompts["in line"], max_tokens=3)
    instance.run(400)
    assert instance.gauges(0)['mstar_evictions_total{kind="recompute"}'] == 0
    for rid, prompt in prompts.items():
        result = instance.results[rid]
        assert (result.failure, result.tokens) == (None, tiny.alone(prompt, len(result.tokens))), rid
    instance.close()


def test_pages_that_juniors_share_among_them_count_as_theirs(tiny: TinyLlama, tuning: Tuning):
    """Two juniors with one page each of their own and eight in common give way together to an important request."""
    instance = tiny.instance(Tuning(**{**vars(tuning), "num_pages": {"kv": 12}}), page_size=PAGE)
    prompt, urgent = PreparedPrompt(ids(tiny, 33, 0)), PreparedPrompt(ids(tiny, 36, 1))
    first = tiny.submit(instance, "first", prompt, max_tokens=15, priority=1)
    for _ in range(3):
        instance.tick()
    second = tiny.submit(instance, "second", prompt, max_tokens=15, priority=1)
    for _ in range(2):
        instance.tick()
    result = tiny.submit(instance, "urgent", urgent, max_tokens=4)
    for _ in range(400):
        if result.done:
            break
        instance.tick()
    assert not first.done and not second.done
    instance.run(400)
    assert result.tokens == tiny.alone(urgent, 4)
    assert first.tokens == second.tokens == tiny.alone(prompt, 15)
    instance.close()


def test_of_several_that_ran_short_together_none_waits_for_what_the_others_lack(tiny: TinyLlama):
    """It would wait for pages that it never needs, and that may never be there."""
    instance = tiny.instance(Tuning(overlap=False, num_pages={"kv": 8}), page_size=PAGE)
    for rid in ("senior", "junior"):
        tiny.submit(instance, rid, PreparedPrompt(ids(tiny, 9, 0)), max_tokens=12)
    instance.tick()
    [parts] = instance.parts
    senior, junior = (parts.inbox._rids.handle(rid) for rid in ("senior", "junior"))
    assert senior is not None and junior is not None
    parts.inbox._requests.in_steps[junior] += 1
    parts.preemption.refused(AdmitOutcome((senior, junior), "kv", 4), busy=True)
    parts.inbox._requests.in_steps[junior] -= 1
    assert parts.preemption.waiting[parts.inbox._requests[senior]].needs == 1
    instance.run(400)
    assert [result.failure for result in instance.results.values()] == [None, None]
    instance.close()
