"""How long steps take: the arithmetic, what a budget makes of it, and that measuring finds it in a noisy clock."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine_rig import EngineRig
from support.tiny_decoder import NODE

from mstar.engine.step_cost import StepCost
from mstar.engine.step_runner import StepWork
from mstar.engine.step_timing import DecodeWalk, measure_step_cost
from mstar.graph.protocol import ReadyKey
from mstar.platforms.executor import DeviceEvent, Work
from mstar.worker.chunk_budget import CHUNK_STEP_TOKENS, MIN_TIMED_CHUNK, MIXED_STEP_FACTOR, ChunkBudget

COST = StepCost(base_s=0.03, token_s=4e-4, context_s=1e-6, pair_s=1e-7, decode_base_s=0.025, decode_row_s=1e-3)
PREFILL, DECODE = ReadyKey(NODE, "prefill"), DecodeWalk(ReadyKey(NODE, "decode"), frozenset({"token"}))

costs = st.builds(
    StepCost,
    base_s=st.floats(0, 0.2),
    token_s=st.floats(1e-6, 0.01),
    context_s=st.floats(0, 1e-5),
    pair_s=st.floats(0, 1e-5),
    decode_base_s=st.floats(0, 0.2),
    decode_row_s=st.floats(0, 0.01),
)


@given(cost=costs, seconds=st.floats(0, 2), start=st.integers(0, 30000))
def test_a_chunk_is_the_longest_that_fits(cost: StepCost, seconds: float, start: int):
    tokens = cost.chunk_tokens(seconds, start)
    assert tokens == 0 or cost.chunk_s(tokens, start) <= seconds * (1 + 1e-9)
    assert cost.chunk_s(tokens + 1, start) >= seconds * (1 - 1e-9)


def _step_s(cost: StepCost, rows: int, contexts: int, chunk: int, start: int) -> float:
    """Of a step with `rows` decode rows and one chunk, from the definition: pair by pair."""
    pairs = contexts + sum(start + position + 0.5 for position in range(chunk))
    read = contexts + start
    return cost.base_s + (rows + chunk) * cost.token_s + read * cost.context_s + pairs * cost.pair_s


@given(cost=costs, rows=st.integers(1, 64), contexts=st.integers(0, 100_000), start=st.integers(0, 6000))
def test_beside_streams_a_chunk_ends_within_their_bound_or_is_the_least(
    cost: StepCost, rows: int, contexts: int, start: int
):
    chunk = ChunkBudget(2048, cost, rows, rows, contexts).cut(start, 10_000, 1)
    reading = contexts * (cost.context_s + cost.pair_s)
    allowed = MIXED_STEP_FACTOR * (cost.decode_base_s + rows * cost.decode_row_s + reading)
    assert chunk >= MIN_TIMED_CHUNK
    assert chunk == MIN_TIMED_CHUNK or _step_s(cost, rows, contexts, chunk, start) <= allowed * (1 + 1e-9)
    if MIN_TIMED_CHUNK < chunk < 2048 - rows:
        assert _step_s(cost, rows, contexts, chunk + 1, start) >= allowed * (1 - 1e-9)


@given(cost=costs, rows=st.integers(1, 64), start=st.integers(0, 6000), waited_s=st.floats(1e-6, 0.5))
def test_streams_that_have_waited_for_other_nodes_have_no_more_beside_them_than_ends_within_their_bound(
    cost: StepCost, rows: int, start: int, waited_s: float
):
    chunk = ChunkBudget(2048, cost, rows, rows, 0, waited_s).cut(start, 10_000, 1)
    allowed = MIXED_STEP_FACTOR * (cost.decode_base_s + rows * cost.decode_row_s)
    assert chunk == 0 or chunk >= MIN_TIMED_CHUNK
    assert chunk == 0 or waited_s + _step_s(cost, rows, 0, chunk, start) <= allowed * (1 + 1e-9)
    if chunk == 0:
        assert waited_s + _step_s(cost, rows, 0, MIN_TIMED_CHUNK, start) >= allowed * (1 - 1e-9)


def test_who_waits_for_nobody_gets_its_chunk_however_long_other_nodes_took():
    assert ChunkBudget(2048, COST, 8, 8, 0, 10.0).cut(0, 10_000, 64) == 0
    assert ChunkBudget(2048, COST, 0, 0, 0, 10.0).cut(0, 10_000, 64) == ChunkBudget(2048, COST, 0, 0, 0).cut(
        0, 10_000, 64
    )


@given(cost=costs, start=st.integers(0, 6000))
def test_alone_a_chunk_takes_a_tenth_of_a_second_or_has_128_tokens(cost: StepCost, start: int):
    chunk = ChunkBudget(2048, cost, 0, 0, 0).cut(start, 10_000, 1)
    assert CHUNK_STEP_TOKENS <= chunk <= 2048
    assert chunk == CHUNK_STEP_TOKENS or _step_s(cost, 0, 0, chunk, start) <= 0.1 * (1 + 1e-9)


def test_chunks_get_shorter_deep_in_a_prompt():
    sizes = [ChunkBudget(2048, COST, 8, 8, 800).cut(start, 10_000, 1) for start in (0, 1000, 3000, 6000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.5 * sizes[-1] > 1.5 * MIN_TIMED_CHUNK


def test_rows_share_a_budget_in_their_order():
    budget = ChunkBudget(100, None, 8, 8, 0)
    assert [budget.cut(0, pending, 1) for pending in (40, 30, 50, 9)] == [40, 30, 22, 0]
    budget = ChunkBudget(2048, COST, 8, 8, 0)
    first, second, third = (budget.cut(0, pending, 1) for pending in (20, 10_000, 10))
    whole = ChunkBudget(2048, COST, 8, 8, 0).cut(0, 10_000, 1)
    assert (first, third) == (20, 0)
    assert whole <= first + second + 1 <= whole + 3, "two short chunks have fewer pairs than one"


@pytest.mark.parametrize("cost", [None, COST])
def test_chunks_end_at_multiples_of_what_the_walk_asks_and_there_is_always_one(cost: StepCost | None):
    budget = ChunkBudget(100, cost, 1, 1, 0)
    assert (7 + budget.cut(7, 10_000, 32)) % 32 == 0
    assert ChunkBudget(8, cost, 64, 64, 0).cut(0, 10_000, 32) == 32, "more than is left, rather than nothing"
    assert ChunkBudget(8, cost, 64, 64, 0).cut(0, 3, 32) == 3


@pytest.mark.parametrize("num_others", [0, 5, 16, 500])
def test_a_number_of_tokens_leaves_what_the_others_do_not_take_and_sixteen_at_least(num_others: int):
    assert ChunkBudget(64, None, num_others, num_others, 0).cut(0, 999, 1) == max(64 - num_others, 16)
    assert ChunkBudget(4, None, num_others, num_others, 0).cut(0, 999, 1) == 4


# measuring


class TimedExecutor:
    """Runs work at once; its events tell times of our own making."""

    overlaps = False

    def __init__(self, seconds: Callable[[StepWork], float]) -> None:
        self._seconds = seconds

    def submit(self, work: Work) -> DeviceEvent:
        assert isinstance(work, StepWork)
        event = DeviceEvent()
        event.run(work)
        event.began_ns = 1000
        event.ended_ns = 1000 + round(1e9 * self._seconds(work))
        return event

    def close(self) -> None:
        """Nothing to end."""


def _seconds(rig: list[EngineRig], work: StepWork) -> float:
    """What a machine with `COST` takes for a step."""
    handles, spans, _ = work.plan.rows
    ends = rig[0].kv.lengths[handles] if rig else np.zeros(handles.size)  # the cache is ahead of the step
    if work.plan.walk == "decode":
        return COST.decode_base_s + handles.size * COST.decode_row_s
    pairs = sum(span * (end - span / 2) for span, end in zip(spans.tolist(), ends.tolist(), strict=True))
    read = int(ends.sum() - spans.sum()) if rig else 0
    return COST.base_s + int(spans.sum()) * COST.token_s + read * COST.context_s + pairs * COST.pair_s


def _rig(seconds: Callable[[list[EngineRig], StepWork], float], **config: Any) -> EngineRig:
    made: list[EngineRig] = []
    sizes: dict[str, Any] = {"max_seq_len": 6000, "num_pages": {"kv": 6200 // 4}, "capacity": 20, **config}
    rig = EngineRig(executor=TimedExecutor(lambda work: seconds(made, work)), **sizes)
    made.append(rig)
    return rig


def test_the_machines_times_are_found():
    rig = _rig(_seconds)
    baseline = dict(rig.engine.gauges())
    found = measure_step_cost(rig.engine, PREFILL, DECODE)
    assert found is not None
    for name in ("base_s", "token_s", "context_s", "pair_s", "decode_base_s", "decode_row_s"):
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=0.02), name
    assert dict(rig.engine.gauges()) == baseline
    rig.check()


def test_a_busy_machine_is_seen_through():
    """Two of five steps take up to four times as long."""
    steps = itertools.count()
    rng = np.random.default_rng(3)

    def noisy(rig: list[EngineRig], work: StepWork) -> float:
        return _seconds(rig, work) * (1 + rng.uniform(1, 3) * (next(steps) % 5 < 2))

    rig = _rig(noisy)
    found = measure_step_cost(rig.engine, PREFILL, DECODE)
    assert found is not None
    chunk = ChunkBudget(2048, found, 8, 8, 800).cut(3000, 10_000, 1)
    assert chunk == pytest.approx(ChunkBudget(2048, COST, 8, 8, 800).cut(3000, 10_000, 1), rel=0.1)


def test_a_walk_without_a_decode_walk_is_measured_by_its_chunks():
    rig = _rig(_seconds)
    found = measure_step_cost(rig.engine, PREFILL, None)
    assert found is not None
    assert (found.decode_base_s, found.decode_row_s) == (found.base_s, found.token_s)


@pytest.mark.parametrize("pages", [30, 40, 200])
def test_a_small_pool_gives_what_it_can(pages: int):
    rig = _rig(_seconds, num_pages={"kv": pages})
    found = measure_step_cost(rig.engine, PREFILL, DECODE)
    assert found is not None
    assert found.token_s == pytest.approx(COST.token_s, rel=0.1)
    rig.check()


def test_a_node_that_cannot_run_is_not_measured_and_nothing_is_left():
    rig = _rig(_seconds)
    rig.decoder.fail = [RuntimeError("broken")] * 20
    baseline = dict(rig.engine.gauges())
    assert measure_step_cost(rig.engine, PREFILL, DECODE) is None
    assert dict(rig.engine.gauges()) == baseline


def test_a_slow_machine_ends_early(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr("mstar.engine.step_timing.time.monotonic", lambda: next(clock))
    steps: list[StepWork] = []

    def counting(rig: list[EngineRig], work: StepWork) -> float:
        steps.append(work)
        return _seconds(rig, work)

    found = measure_step_cost(_rig(counting).engine, PREFILL, DECODE)
    assert found is not None and found.token_s == pytest.approx(COST.token_s, rel=0.02)
    assert len(steps) < 20, "two or three rounds instead of six"
