"""Memory that does not suffice for all at once: who gives way comes back, and every text is that of a large pool."""

import random
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.composite.deployment import Composite, make_requests
from support.instance import LOOPS, Instance, Tuning
from support.tiny_serving import TinyLlama

from mstar.engine.resources.paged_kv import page_bytes
from mstar.engine.spec import PagedKVSpec
from mstar.model.base import PreparedPrompt

PAGE = 8


def on_pages(tiny: TinyLlama, tuning: Tuning, num_pages: int, *, host_pages: int = 0, **more: object) -> Tuning:
    """`tuning` with a pool of `num_pages` of `PAGE` tokens, and room for `host_pages` beside it."""
    [spec] = [
        spec for node in tiny.model.get_node_resources() for spec in node.resources if isinstance(spec, PagedKVSpec)
    ]
    host_bytes = host_pages * page_bytes(replace(spec, page_size=PAGE), torch.float32)
    engine = {"host_bytes": {"kv": host_bytes}} if host_pages else {}
    return replace(tuning, num_pages={"kv": num_pages}, engine=engine, **more)  # pyright: ignore[reportArgumentType]


@dataclass
class Watched:
    """An instance whose every tick is looked at: either something goes on, or nothing waits for the machine."""

    tiny: TinyLlama
    instance: Instance
    prompts: dict[str, tuple[PreparedPrompt, int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Ids in the order of their ends."""
    num_silent: int = 0
    """Ticks in a row in which nothing happened though something waited."""

    def __post_init__(self) -> None:
        [parts] = self.instance.parts
        memory, preempt = parts.engine.memory, parts.engine.memory.preempt

        def watching(handle: int, resource: str) -> object:
            assert parts.teardown._requests.in_steps[handle] == 0, "a victim in flight"
            return preempt(handle, resource)

        memory.preempt = watching  # pyright: ignore[reportAttributeAccessIssue]

    def submit(self, rid: str, length: int, max_tokens: int, *, seed: int = 0, priority: int = 0) -> None:
        """Prompts of one seed begin alike."""
        longest = self.tiny.prompt(128, seed)
        assert longest.token_ids is not None
        prompt = replace(longest, token_ids=longest.token_ids[:length])
        self.prompts[rid] = prompt, max_tokens
        self.tiny.submit(self.instance, rid, prompt, max_tokens=max_tokens, priority=priority)

    def tick(self) -> bool:
        instance = self.instance
        num_steps = len(instance.steps)
        busy = instance.tick()
        self.order += [rid for rid, result in instance.results.items() if result.done and rid not in self.order]
        gauges = instance.gauges(0)
        waits = gauges["mstar_queue_depth"] + gauges["mstar_held_requests"] + gauges["mstar_preempted_requests"]
        in_flight = instance.workers[0]._cur is not None
        silent = len(instance.steps) == num_steps and not in_flight and waits > 0
        self.num_silent = self.num_silent + 1 if silent else 0
        assert self.num_silent <= 3, "it idles while something waits"
        for holdings in instance.parts[0].engine.memory._holdings.values():
            holdings.arena.check()
        return busy

    def until_somebody(self, waits: str) -> str:
        """Ticks until a request is "held" or "preempted", and names it."""
        [parts] = self.instance.parts
        for _ in range(500):
            self.tick()
            for handle, wait in parts.preemption.waiting._waits.items():
                if bool(wait.taken) == (waits == "preempted"):
                    return parts.teardown._rids.rid(handle)
        raise AssertionError(f"nobody was {waits}")

    def run(self) -> None:
        for _ in range(5000):
            if not self.tick() and not self.instance.num_handles:
                return
        raise AssertionError(f"not done: {[result for result in self.instance.results.values() if not result.done]}")

    def check(self) -> None:
        """Every text that was not given up is what the request gets alone, and nothing is held any more."""
        for rid, (prompt, max_tokens) in self.prompts.items():
            result = self.instance.results[rid]
            if not result.aborted:
                assert result.failure is None, rid
                assert result.tokens == self.tiny.alone(prompt, max_tokens), rid
        assert self.instance.held(0) == {}

    def evictions(self, kind: str) -> int:
        return int(self.instance.gauges(0)[f'mstar_evictions_total{{kind="{kind}"}}'])

    def close(self) -> None:
        self.instance.close()


def watched(tiny: TinyLlama, tuning: Tuning) -> Watched:
    return Watched(tiny, tiny.instance(tuning, page_size=PAGE))


@pytest.mark.parametrize("host_pages", [0, 20])
def test_two_prompts_of_most_of_the_pool_both_finish(tiny: TinyLlama, tuning: Tuning, host_pages: int):
    run = watched(tiny, on_pages(tiny, tuning, 10, host_pages=host_pages))
    run.submit("first", 64, 12)
    run.submit("second", 64, 16, seed=1)
    run.run()
    assert run.order == ["first", "second"]
    run.check()
    run.close()


@pytest.mark.parametrize("host_pages", [0, 64])
def test_long_generations_on_a_tiny_pool_read_as_on_a_large_one(tiny: TinyLlama, tuning: Tuning, host_pages: int):
    """Case D10: eight grow together to three times what the pool holds."""
    run = watched(tiny, on_pages(tiny, tuning, 16, host_pages=host_pages))
    for index in range(8):
        run.submit(f"r{index}", 5 + index, 40, seed=index)
    run.run()
    run.check()
    assert run.evictions("offload" if host_pages else "recompute") >= 3
    assert run.order[0] == "r0", "the most senior one never waits"
    run.close()


@pytest.mark.parametrize("others", [0, 2])
def test_a_request_that_fills_the_pool_to_the_last_token_finishes(tiny: TinyLlama, tuning: Tuning, others: int):
    run = watched(tiny, on_pages(tiny, tuning, 6))
    run.submit("full", 30, 6 * PAGE - 30)
    for index in range(others):
        run.submit(f"r{index}", 9, 20, seed=index)
    run.run()
    run.check()
    run.close()


@pytest.mark.parametrize("seed", range(3))
def test_large_prompts_then_small_ones_with_aborts_at_random(tiny: TinyLlama, tuning: Tuning, seed: int):
    """Case E3."""
    rng = random.Random(seed)
    pages = 12
    run = watched(tiny, on_pages(tiny, tuning, pages, host_pages=rng.choice((0, 8, 40)), max_rows=6))
    for index in range(2):
        run.submit(f"large{index}", rng.randint(pages * PAGE * 6 // 10, pages * PAGE * 8 // 10), rng.randint(2, 9))
    for index in range(8):
        for _ in range(rng.randint(0, 4)):
            run.tick()
        run.submit(f"small{index}", rng.randint(3, 20), rng.randint(4, 24), seed=index)
        doomed = rng.choice(list(run.prompts))
        if rng.random() < 0.3 and not run.instance.results[doomed].done:
            run.instance.abort(doomed)
    run.run()
    run.check()
    run.close()


def test_an_important_request_goes_before_all_that_wait_and_takes_room_from_those_that_run(
    tiny: TinyLlama, tuning: Tuning
):
    run = watched(tiny, on_pages(tiny, tuning, 8))
    run.submit("running", 40, 20)
    run.submit("waiting", 30, 5, seed=1)
    for _ in range(3):
        run.tick()
    run.submit("urgent", 45, 6, seed=2, priority=-1)
    run.submit("as usual", 33, 4, seed=3)
    run.run()
    assert run.order == ["urgent", "running", "waiting", "as usual"]
    assert run.evictions("recompute") == 1
    run.check()
    run.close()


def test_among_equals_nobody_loses_what_it_has_to_one_that_asks_to_come_in(tiny: TinyLlama, tuning: Tuning):
    run = watched(tiny, on_pages(tiny, tuning, 8))
    run.submit("running", 40, 8, priority=3)
    for _ in range(3):
        run.tick()
    run.submit("equal", 40, 8, seed=1, priority=3)
    run.run()
    assert run.order == ["running", "equal"]
    assert run.evictions("recompute") == 0
    run.check()
    run.close()


def test_with_all_rows_taken_the_least_important_waits_for_its_turn_and_keeps_its_pages(
    tiny: TinyLlama, tuning: Tuning
):
    run = watched(tiny, on_pages(tiny, tuning, 40, max_rows=2))
    run.submit("kept", 6, 12, priority=1)
    run.submit("paused", 7, 30, priority=2)
    for _ in range(4):
        run.tick()
    run.submit("urgent", 8, 6, priority=0)
    for _ in range(3):
        run.tick()
    assert run.instance.gauges(0)["mstar_held_requests"] == 1
    num_tokens = len(run.instance.results["paused"].tokens)
    for _ in range(3):
        run.tick()
    assert len(run.instance.results["paused"].tokens) == num_tokens
    run.run()
    assert run.order[-1] == "paused"
    assert max(len(step.rows) for step in run.instance.steps) == 2
    assert run.evictions("recompute") == 0
    run.check()
    run.close()


def test_an_important_request_that_cannot_be_helped_stops_nobody(tiny: TinyLlama, tuning: Tuning):
    """All that the less important ones have would not suffice: they go on until a more important one has left."""
    run = watched(tiny, on_pages(tiny, tuning, 10))
    run.submit("top", 40, 9, priority=-2)
    run.submit("low", 8, 20, seed=1, priority=2)
    for _ in range(4):
        run.tick()
    run.submit("large", 60, 9, seed=2, priority=-1)
    for _ in range(3):
        run.tick()
    assert run.evictions("recompute") == 0
    run.run()
    run.check()
    run.close()


@pytest.mark.parametrize("host_pages", [0, 30])
@pytest.mark.parametrize("moment", ["preempted", "coming back", "held"])
def test_an_aborted_request_is_gone_within_two_steps_whatever_it_waits_for(
    tiny: TinyLlama, tuning: Tuning, host_pages: int, moment: str
):
    run = watched(tiny, on_pages(tiny, tuning, 4 if moment == "held" else 10, host_pages=host_pages))
    [parts] = run.instance.parts
    rids = parts.teardown._rids
    if moment == "held":  # the junior is the first to need a third page, and nobody gives way to it
        run.submit("r0", 9, 14)
        run.submit("r1", 14, 10, seed=1)
        rid = run.until_somebody("held")
    else:
        for index in range(4):
            run.submit(f"r{index}", 10, 30, seed=index)
        rid = run.until_somebody("preempted")
        handle = rids.handle(rid)
        assert handle is not None
        while moment == "coming back" and handle in parts.preemption.waiting._waits:
            run.tick()
    run.instance.abort(rid)
    for _ in range(3):
        run.instance.tick()
    assert rids.handle(rid) is None
    run.run()
    run.check()
    run.close()


def test_a_worker_with_nothing_to_run_sleeps(tiny: TinyLlama, tuning: Tuning):
    """What waits for a message of the front does not keep the loop turning."""
    run = watched(tiny, on_pages(tiny, tuning, 6))
    run.submit("first", 33, 8)
    run.submit("second", 33, 8, seed=1)
    [worker] = run.instance.workers
    turns = [worker.tick_once() for _ in range(40)]
    assert turns[-5:] == [False] * 5
    assert run.instance.gauges(0)["mstar_queue_depth"] == 1
    run.run()
    run.check()
    run.close()


def test_prompt_tokens_that_came_from_the_cache_are_not_reported_as_computed(tiny: TinyLlama, tuning: Tuning):
    run = watched(tiny, on_pages(tiny, tuning, 12))
    done = run.instance.parts[0].walks.done
    seen: list[int] = []
    flush = run.instance.parts[0].outbox._to_front

    def recording(messages):
        seen.extend(message.num_computed_prompt_tokens for message in done)
        flush(messages)

    run.instance.parts[0].outbox._to_front = recording
    run.submit("first", 30, 3)
    run.run()
    run.submit("again", 30, 3)
    run.run()
    assert seen == [30, 30 - 3 * PAGE]
    run.check()
    run.close()


class Arrival(NamedTuple):
    """A request and what follows it: ticks, and perhaps an abort of the one that came `abort` before."""

    length: int
    max_tokens: int
    seed: int
    priority: int
    num_ticks: int
    abort: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        length=st.integers(1, 44),
        max_tokens=st.integers(1, 24),
        seed=st.integers(0, 1),
        priority=st.sampled_from((0, 0, 0, 1, -1)),
        num_ticks=st.integers(0, 6),
        abort=st.one_of(st.none(), st.none(), st.integers(0, 3)),
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=ARRIVALS,
    mode=st.sampled_from(list(LOOPS)),
    num_pages=st.integers(6, 14),
    host_pages=st.sampled_from((0, 5, 60)),
    max_rows=st.integers(1, 6),
    max_step_tokens=st.sampled_from((16, 40, 256)),
    prefix_cache=st.booleans(),
)
def test_whatever_comes_every_text_is_right_and_nothing_is_left(
    tiny: TinyLlama,
    arrivals: list[Arrival],
    mode: str,
    num_pages: int,
    host_pages: int,
    max_rows: int,
    max_step_tokens: int,
    prefix_cache: bool,
):
    tuning = on_pages(
        tiny, LOOPS[mode], num_pages, host_pages=host_pages, max_rows=max_rows, max_step_tokens=max_step_tokens
    )
    run = watched(tiny, replace(tuning, engine={**tuning.engine, "prefix_cache": prefix_cache}))
    for index, arrival in enumerate(arrivals):
        length = min(arrival.length, num_pages * PAGE - arrival.max_tokens)
        run.submit(f"r{index}", length, arrival.max_tokens, seed=arrival.seed, priority=arrival.priority)
        for _ in range(arrival.num_ticks):
            run.tick()
        doomed = f"r{index - (arrival.abort or 0)}"
        if arrival.abort is not None and doomed in run.prompts and not run.instance.results[doomed].done:
            run.instance.abort(doomed)
    run.run()
    run.check()
    run.close()


@pytest.fixture(scope="module")
def composite(tmp_path_factory: pytest.TempPathFactory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


@pytest.mark.parametrize("placement", ["one_worker", "ends_apart", "three_workers"])
@pytest.mark.parametrize("host_pages", [0, 6, 60])
def test_requests_over_several_workers_on_tiny_pools(composite: Composite, placement: str, host_pages: int):
    """Its language model cannot compute a cache again: who counts on no room on the host, as none does that spans
    workers, was promised all of the device."""
    [spec] = [
        spec
        for node in composite.model.get_node_resources()
        for spec in node.resources
        if isinstance(spec, PagedKVSpec)
    ]
    engine = {"host_bytes": {"kv": host_pages * page_bytes(spec, torch.float32)}} if host_pages else {}
    tuning = Tuning(late=host_pages == 6, num_pages={"kv": 4}, max_rows=6, engine=engine)
    instance = composite.instance(placement, tuning)
    requests = make_requests(9, seed=1)
    for index, request in enumerate(requests):
        composite.submit(instance, f"r{index}", request)
        for _ in range(index % 4):
            instance.tick()
    instance.run()
    for index, request in enumerate(requests):
        composite.check(instance, f"r{index}", request)
    for rank in range(len(instance.workers)):
        assert instance.held(rank) == {}
    evicted = sum(
        instance.gauges(rank)['mstar_evictions_total{kind="offload"}'] for rank in range(len(instance.workers))
    )
    assert (evicted > 0) == (host_pages > 0 and placement == "one_worker")
    instance.close()
