"""Steps that take longer, or less long, than was foretold: the next chunks are cut by what was seen."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.step_cost import StepCost
from mstar.worker.chunk_budget import MIN_TIMED_CHUNK, ChunkBudget
from mstar.worker.pace import BOUND, Pace

COST = StepCost(base_s=0.004, token_s=4e-4, context_s=1e-6, pair_s=1e-7, decode_base_s=0.010, decode_row_s=1e-3)


def step(spans: list[int], lengths: list[int]) -> Any:
    columns = SimpleNamespace(lengths=np.array(lengths, np.int32))
    return SimpleNamespace(num_rows=len(spans), spans=np.array(spans, np.int32), columns=columns)


DECODE, MIXED = step([1, 1, 1], [100, 50, 250]), step([1, 1, 40, 20], [100, 300, 0, 500])
DECODE_S = 0.010 + 3 * 1e-3 + 400 * 1.1e-6
MIXED_S = 0.004 + 62 * 4e-4 + 400 * 1.1e-6 + 40 * 20 * 1e-7 + 500 * 1e-6 + 20 * 510 * 1e-7
"""By hand, from the definition of the cost."""


def test_steps_that_take_what_was_foretold_change_nothing():
    pace = Pace()
    for _ in range(10):
        pace.ended(DECODE, DECODE_S, COST)
        pace.ended(MIXED, MIXED_S, COST)
    assert pace.decode == pytest.approx(1.0) and pace.mixed == pytest.approx(1.0)


@given(decode=st.floats(0.2, 6.0), mixed=st.floats(0.2, 6.0))
def test_it_finds_how_much_longer_either_kind_takes(decode: float, mixed: float):
    pace = Pace()
    for _ in range(150):
        pace.ended(DECODE, decode * DECODE_S, COST)
        pace.ended(MIXED, mixed * MIXED_S, COST)
    assert pace.decode == pytest.approx(decode, rel=0.01)
    assert pace.mixed == pytest.approx(mixed, rel=0.01)


def test_one_step_that_something_disturbed_hardly_counts_and_nothing_goes_beyond_the_bound():
    pace = Pace()
    pace.ended(MIXED, 100 * MIXED_S, COST)
    assert 1.0 < pace.mixed < 1.05
    for _ in range(1000):
        pace.ended(MIXED, 100 * MIXED_S, COST)
        pace.ended(DECODE, 0.0, COST)
    assert pace.mixed == BOUND and pace.decode == 1 / BOUND
    free = StepCost(0.0, 1e-8, 0.0, 0.0, 0.0, 0.0)
    pace.ended(DECODE, 1.0, free)
    assert pace.decode == 1 / BOUND, "nothing was foretold that it could be compared with"


def chunk(pace: Pace, streams: int = 8) -> int:
    return ChunkBudget(2048, COST, streams, streams, 800, pace=pace).cut(1000, 10_000, 1)


def test_chunks_shrink_where_they_take_longer_and_grow_where_decode_rows_do():
    pace = Pace()
    as_foretold = chunk(pace)
    allowed = 2.5 * (0.010 + 8 * 1e-3 + 800 * 1.1e-6)
    pace.mixed = 1.5
    shorter = chunk(pace)
    taken = 1.5 * (COST.mixed_s(8, 800) + COST.chunk_s(shorter, 1000))
    assert MIN_TIMED_CHUNK < shorter < as_foretold
    assert taken <= allowed < taken + 1.5 * (COST.chunk_s(shorter + 1, 1000) - COST.chunk_s(shorter, 1000))
    pace.decode = 1.5
    assert chunk(pace) == as_foretold, "both take longer alike"
    pace.mixed = 1.0
    assert chunk(pace) > as_foretold
