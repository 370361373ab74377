"""Chunk policies against tables worked out by hand, and against a plain cutting of the whole list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.streaming.chunk_policy import ChunkPolicy, ChunkWindow, fixed, left_context, sliding

TABLES = [
    # (policy, number of items, windows of all passes)
    (fixed(4), 10, [(0, 4), (4, 8), (8, 10)]),
    (fixed(4), 8, [(0, 4), (4, 8)]),
    (fixed(4), 0, []),
    (sliding(28, 7), 42, [(0, 28), (7, 35), (14, 42)]),
    (sliding(28, 7), 30, [(0, 28), (7, 30)]),
    (sliding(28, 7), 5, [(0, 5)]),
    (sliding(3, 3), 7, [(0, 3), (3, 6), (6, 7)]),
    (left_context(5, 3), 12, [(0, 5), (2, 10), (7, 12)]),
    (left_context(5, 3, first=1), 12, [(0, 1), (0, 6), (3, 11), (8, 12)]),
    (left_context(2, 25), 6, [(0, 2), (0, 4), (0, 6)]),
]


def passes(policy: ChunkPolicy, total: int) -> list[ChunkWindow]:
    """All passes over a stream that has arrived whole."""
    found: list[ChunkWindow] = []
    while (window := policy.window(found[-1].stop if found else 0, total, False)) is not None:
        found.append(window)
    return found


@pytest.mark.parametrize(("policy", "total", "expected"), TABLES)
def test_windows_of_a_whole_stream(policy: ChunkPolicy, total: int, expected: list[tuple[int, int]]) -> None:
    assert [(window.start, window.stop) for window in passes(policy, total)] == expected


def test_what_is_kept_for_the_next_pass() -> None:
    assert [window.keep_from for window in passes(sliding(28, 7), 42)] == [7, 14, 42]
    assert [window.keep_from for window in passes(left_context(5, 3, first=1), 12)] == [0, 3, 8, 12]


def test_a_full_chunk_waits_until_it_is_known_whether_it_is_the_last() -> None:
    policy = fixed(4)
    assert policy.window(0, 3, None) is None
    assert policy.window(0, 4, None) is None
    assert policy.window(0, 4, True) == (0, 4, 4)
    assert policy.window(0, 4, False) == (0, 4, 4)
    assert policy.window(0, 5, None) == (0, 4, 4)
    assert fixed(4, hold_last=False).window(0, 4, None) == (0, 4, 4)


def test_a_remainder_waits_for_the_end() -> None:
    assert fixed(4).window(4, 6, None) is None
    assert fixed(4).window(4, 6, True) is None
    assert fixed(4).window(4, 6, False) == (4, 6, 6)
    assert fixed(4).window(6, 6, False) is None


policies = st.builds(
    ChunkPolicy,
    stride=st.integers(1, 5),
    context=st.integers(0, 6),
    first=st.none() | st.integers(1, 6),
    hold_last=st.booleans(),
)


@given(policies, st.integers(0, 40))
def test_every_item_is_new_to_exactly_one_pass(policy: ChunkPolicy, total: int) -> None:
    windows = passes(policy, total)
    new = []
    for before, window in zip([ChunkWindow(0, 0, 0), *windows], windows, strict=False):
        new += range(before.stop, window.stop)
        assert window.start == max(0, before.stop - policy.context)
        assert before.keep_from <= window.start
    assert new == list(range(total))
    assert not windows or windows[-1].keep_from == total


@given(policies, st.integers(0, 40), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_windows_do_not_depend_on_when_items_arrive(
    policy: ChunkPolicy, total: int, events: list[tuple[int, bool]]
) -> None:
    """Each event brings some items, and perhaps the knowledge of the end; the last brings what is left."""
    found: list[ChunkWindow] = []
    arrived, known = 0, False
    for count, end in [*events, (total, True)]:
        arrived = min(total, arrived + count)
        known = known or end
        more = arrived < total if known else None
        while (window := policy.window(found[-1].stop if found else 0, arrived, more)) is not None:
            found.append(window)
    wholly = passes(policy, total)
    assert [(w.start, w.stop) for w in found] == [(w.start, w.stop) for w in wholly]
    if policy.hold_last:
        assert found == wholly
