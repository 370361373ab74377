"""How many choices may be under way, and when a refused one is asked to come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.conductor.events import RefusedError
from mstar.conductor.queue_bound import LEAST_RETRY_AFTER_S, MOST_RETRY_AFTER_S, WINDOW, Load, QueueBound


def retry_after(bound: QueueBound, num_choices: int, load: Load, now: float) -> int | None:
    """None: it is admitted."""
    try:
        bound.admit(num_choices, load, now)
    except RefusedError as refused:
        assert (refused.failure.status, refused.failure.code) == (429, "queue_full")
        return refused.failure.retry_after_s
    return None


@pytest.mark.parametrize(
    ("num_choices", "load", "is_taken"),
    [
        (1, Load(0, 0, 0), True),
        (5, Load(0, 0, 0), True),
        (1, Load(4, 4, 0), True),
        (1, Load(5, 5, 0), False),
        (1, Load(5, 0, 0), False),
        (2, Load(3, 3, 0), True),
        (3, Load(3, 3, 0), False),
        (1, Load(3, 3, 1), True),
        (1, Load(3, 3, 2), False),
        (2, Load(3, 3, 1), False),
        (1, Load(3, 0, 2), True),
        (1, Load(3, 1, 2), True),
    ],
)
def test_three_may_run_and_two_may_wait(num_choices: int, load: Load, is_taken: bool):
    assert (retry_after(QueueBound(3, 2), num_choices, load, 0.0) is None) == is_taken


def test_without_a_queue_only_what_can_run_is_taken():
    bound = QueueBound(2, 0)
    taken = [retry_after(bound, 1, Load(live, live, 0), 0.0) is None for live in range(4)]
    assert taken == [True, True, False, False]


def test_retry_after_follows_the_rate_of_ends():
    """3 ends in 12 s: 4 s each, so 2 choices in the way take 8 s."""
    bound = QueueBound(3, 2)
    assert retry_after(bound, 5, Load(0, 0, 0), 100.0) is None
    assert retry_after(bound, 1, Load(5, 5, 0), 105.0) == LEAST_RETRY_AFTER_S, "nothing has ended yet"
    for now in (104.0, 108.0, 112.0):
        bound.ended(1, now)
    assert retry_after(bound, 1, Load(5, 5, 0), 112.0) == 4
    assert retry_after(bound, 2, Load(5, 5, 0), 112.0) == 8
    assert retry_after(bound, 1, Load(5, 5, 0), 112.1) == 5, "whole seconds, rounded up"
    assert retry_after(bound, 5, Load(5, 5, 0), 1000.0) == MOST_RETRY_AFTER_S


def test_time_without_requests_does_not_slow_the_estimate():
    bound = QueueBound(1, 1)
    assert retry_after(bound, 2, Load(0, 0, 0), 0.0) is None
    bound.ended(2, 1.0)
    assert retry_after(bound, 2, Load(0, 0, 0), 5000.0) is None
    bound.ended(1, 5002.0)
    assert retry_after(bound, 2, Load(2, 2, 0), 5002.0) == 4


def test_only_the_last_ends_count():
    bound = QueueBound(1, 1)
    assert retry_after(bound, 2, Load(0, 0, 0), 0.0) is None
    for index in range(WINDOW):
        bound.ended(1, 1000.0 + 3 * index)
    assert retry_after(bound, 1, Load(2, 2, 0), 1000.0 + 3 * WINDOW) == 3


@given(
    st.integers(1, 6),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=60),
)
def test_never_more_than_the_bound_and_never_less_than_possible(
    max_rows: int, max_queue: int, events: list[tuple[int, bool]]
):
    """Requests come and choices end in any order: one is refused exactly when it does not fit, and the hint is whole
    seconds within its limits."""
    bound, live = QueueBound(max_rows, max_queue), 0
    for now, (count, is_end) in enumerate(events):
        if is_end:
            ended = min(count, live)
            live -= ended
            bound.ended(ended, float(now))
            continue
        hint = retry_after(bound, count, Load(live, live, 0), float(now))
        assert (hint is None) == (live + count <= max_rows + max_queue)
        if hint is None:
            live += count
        else:
            assert LEAST_RETRY_AFTER_S <= hint <= MOST_RETRY_AFTER_S
