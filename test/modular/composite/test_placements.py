"""The composite model over one, two and three workers equals its reference, with and without overlap."""

import random

import pytest
import torch
from support.composite.declarations import CODES, FLOW, LLM
from support.composite.deployment import PLACEMENTS, Composite, make_requests
from support.instance import Instance, Tuning, shared_memory_of

REQUESTS = make_requests(10)
TUNINGS = {
    "plain": Tuning(overlap=False),
    "overlap, inline": Tuning(),
    "overlap, late": Tuning(late=True),
    "overlap, late, captured": Tuning(late=True, capture_sizes=(1, 2, 4, 8)),
    "overlap, threaded, captured": Tuning(threaded=True, capture_sizes=(1, 2, 4, 8)),
}


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


def _assert_idle(instance: Instance) -> None:
    """Nothing of any request is left on any worker."""
    for rank, parts in enumerate(instance.parts):
        gauges = instance.gauges(rank)
        for name in ("mstar_handles", "mstar_running_rows", "mstar_queue_depth", "mstar_tensors"):
            assert gauges[name] == 0, f"worker {rank}: {name} is {gauges[name]}"
        assert gauges.get('mstar_pages{pool="kv",state="owned"}', 0) == 0
        assert not parts.inbox.leaving


CASES = [
    *((placement, "overlap, threaded, captured") for placement in PLACEMENTS),
    *(
        (placement, tuning)
        for placement in ("one_worker", "three_workers")
        for tuning in TUNINGS
        if tuning != "overlap, threaded, captured"
    ),
]


@pytest.mark.parametrize(("placement", "tuning"), CASES)
def test_outputs_equal_the_reference(composite: Composite, placement: str, tuning: str):
    instance = composite.instance(placement, TUNINGS[tuning])
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"r{index}", request)
    instance.run()
    for index, request in enumerate(REQUESTS):
        composite.check(instance, f"r{index}", request)
    _assert_idle(instance)
    num_prompt = sum(len(composite.model.process_prompt(r.as_prompt()).token_ids) for r in REQUESTS)
    assert sum(parts.counters.num_prefill_tokens for parts in instance.parts) == num_prompt
    assert sum(parts.counters.num_recomputed_tokens for parts in instance.parts) == 0
    assert len(shared_memory_of(instance.name)) >= len(instance.workers) - 1, "nothing could be left behind"
    instance.close()
    assert shared_memory_of(instance.name) == []
    rows = {len(step.rows) for step in instance.steps}
    assert len(rows) >= 5 and max(rows) >= 8, f"row counts {sorted(rows)} test no batching"
    speculated = {step.node for step in instance.steps if step.speculated}
    assert speculated == ({CODES} if TUNINGS[tuning].overlap else set())


@pytest.mark.parametrize("placement", ["one_worker", "three_workers"])
@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_and_aborts(composite: Composite, placement: str, seed: int):
    rng = random.Random(seed)
    tuning = Tuning(threaded=seed == 1, late=seed == 2, max_rows=5, capture_sizes=(1, 2, 4))
    instance = composite.instance(placement, tuning)
    waiting = rng.sample(range(len(REQUESTS)), len(REQUESTS))
    doomed = set(rng.sample(waiting, 3))
    sent: list[int] = []
    while waiting:
        for _ in range(rng.randint(1, 3)):
            if waiting:
                sent.append(waiting.pop())
                composite.submit(instance, f"r{sent[-1]}", REQUESTS[sent[-1]])
        for _ in range(rng.randint(0, 8)):
            instance.tick([rank for rank in range(len(instance.workers)) if rng.random() < 0.7])
        for index in doomed.intersection(sent):
            if rng.random() < 0.4 and not instance.results[f"r{index}"].done:
                instance.abort(f"r{index}")
    instance.run()
    for index in sent:
        if not instance.results[f"r{index}"].aborted:
            composite.check(instance, f"r{index}", REQUESTS[index])
    _assert_idle(instance)
    instance.close()


@pytest.mark.parametrize("placement", ["one_worker", "three_workers"])
def test_a_request_that_fails_harms_no_other(composite: Composite, placement: str):
    """Media that are not numbers make the first token's logits NaN on one worker; its row goes everywhere."""
    instance = composite.instance(placement, Tuning(threaded=True))
    broken = REQUESTS[2]
    bad = type(broken)(torch.full_like(broken.media, float("nan")), broken.latent, broken.prompt, broken.max_tokens)
    composite.submit(instance, "bad", bad)
    for index in range(5):
        composite.submit(instance, f"r{index}", REQUESTS[index])
    instance.run()
    assert "not finite" in (instance.results["bad"].failure or "")
    for index in range(5):
        composite.check(instance, f"r{index}", REQUESTS[index])
    _assert_idle(instance)
    instance.close()


def test_what_is_speculated_on(composite: Composite):
    """The inner loop is, up to its end that the host knows; the flow loop, which declines, is not."""
    instance = composite.instance("one_worker", Tuning())
    request = make_requests(1, max_tokens=4)[0]
    composite.submit(instance, "r0", request)
    instance.run()
    composite.check(instance, "r0", request)
    nodes = [step.node for step in instance.steps]
    assert (nodes.count(LLM), nodes.count(CODES), nodes.count(FLOW)) == (4, 3 * 3, 5), "a step ran in vain"
    codes = [step.speculated for step in instance.steps if step.node == CODES]
    assert sum(codes) >= 5  # the second and third of each frame, but for the first step ever
    assert not any(step.speculated for step in instance.steps if step.node == FLOW)
    instance.close()
