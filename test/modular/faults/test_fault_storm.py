"""Faults anywhere, at any time, on a pool that is too small, with prompts in chunks, shared prefixes, requests that
give way and come back, and clients that leave: whoever no fault has hit has the text that it has alone."""

import random
from dataclasses import replace

import pytest
from support.faults.declared import HOOKS, STAGES, Fault, run_out_of_memory
from support.faults.instance_faults import InstanceFaults, settle
from support.instance import Tuning
from support.tiny_serving import TinyLlama

from mstar.model.llama.model import NODE

NUM_REQUESTS = 12
SHAPES = ((5, 0), (60, 0), (60, 1), (62, 2), (90, 0), (90, 2))
"""Lengths and seeds of the prompts: the longer ones fill one page of 64 tokens, and grow into a second or third."""
PAGE_BYTES = 1 << 16
"""More than a page of the tiny model takes, so that a few fit into the host's memory."""

WANTED = ("mstar_evictions_total", "mstar_prefix_hit_tokens_total", "mstar_recomputed_tokens_total")
seen: set[str] = set()
"""What happened in the storms: places struck, and counters that moved."""


def storm_tuning(rng: random.Random) -> Tuning:
    kind = rng.choice([Tuning(overlap=False), Tuning(), Tuning(threaded=True), Tuning(late=True)])
    engine = {"prefix_cache": rng.random() < 0.7, "host_bytes": rng.choice([{}, {"kv": 4 * PAGE_BYTES}])}
    return replace(
        kind,
        max_rows=8,
        max_step_tokens=rng.choice([16, 48, 256]),
        max_seq_len=128,
        num_pages={"kv": rng.choice([3, 4, 6])},
        engine=engine,
    )


def storm_fault(rng: random.Random) -> tuple[Fault, str]:
    """A fault and its target."""
    rid = rng.choice([None, f"r{rng.randrange(NUM_REQUESTS)}"])
    after = rng.randint(0, 15)
    if rng.random() < 0.25:
        return Fault("forward_batched", after=after, min_rows=rng.randint(1, 4), effect=run_out_of_memory), NODE
    place = rng.choice([*(hook for hook in HOOKS if hook != "prepare_inputs"), *STAGES])
    return Fault(place, rid=rid, after=after), NODE if place in HOOKS else rng.choice(["kv", "attn", "sampler"])


@pytest.mark.parametrize("seed", range(12))
def test_survivors_have_their_solo_texts_and_nothing_is_left(tiny: TinyLlama, seed: int):
    rng = random.Random(seed)
    node = tiny.build_node()
    node.max_rows = rng.choice([2, 3, 8])
    instance = tiny.instance(storm_tuning(rng), node)
    faults = InstanceFaults(instance)
    installed = [faults.add(*storm_fault(rng)) for _ in range(3)]
    prompts = {}
    aborted = set()
    for index in range(NUM_REQUESTS):
        rid = f"r{index}"
        prompts[rid] = (tiny.prompt(*rng.choice(SHAPES)), rng.choice([3, 8, 14]))
        tiny.submit(instance, rid, prompts[rid][0], max_tokens=prompts[rid][1])
        for _ in range(rng.randint(0, 6)):
            instance.tick()
        leaving = rng.choice(list(prompts))
        if rng.random() < 0.15 and not instance.results[leaving].done:
            instance.abort(leaving)
            aborted.add(leaving)
    instance.run()
    hit = {rid for fault in installed for rid in fault.rids}
    for rid, (prompt, num_tokens) in prompts.items():
        result, solo = instance.results[rid], tiny.greedy(prompt, num_tokens)
        if result.failure is not None:
            assert rid in hit, f"{rid} failed without a fault: {result.failure}"
        elif rid not in aborted:
            assert result.tokens == solo, rid
        assert result.tokens == solo[: len(result.tokens)], rid
    seen.update(fault.place for fault in installed if fault.struck)
    seen.update(name for name, value in instance.gauges(0).items() if value and name.startswith(WANTED))
    faults.clear()
    settle(instance)
    faults.assert_baseline()
    prompt = tiny.prompt(90)
    after = tiny.submit(instance, "after", prompt, max_tokens=14)
    instance.run()
    assert after.tokens == tiny.greedy(prompt, 14)
    settle(instance)
    faults.assert_baseline()
    instance.close()


def test_the_storms_had_it_all():
    """Otherwise they would say little. After all seeds only."""
    if len(seen) < 2:
        pytest.skip("the storms did not run")
    assert {f'mstar_evictions_total{{kind="{kind}"}}' for kind in ("cached", "offload", "recompute")} <= seen
    assert seen >= {"mstar_prefix_hit_tokens_total", "forward_batched"}
    assert len(seen & {*HOOKS, *STAGES}) >= 6
