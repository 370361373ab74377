"""Stop strings in text that comes in pieces, against an implementation that sees the whole text at once."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mstar.api_server.stop_strings import StopAutomaton, StopMatcher


def cut_whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, literally: grow the text by one character until it ends with a stop string; cut the longest such."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def could_become_stop(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a beginning of a stop string."""
    return max(n for stop in stops for n in range(len(stop)) if n == 0 or text.endswith(stop[:n]))


def pieces_of(text: str, borders: list[int]) -> list[str]:
    cuts = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]


letters = st.text(alphabet="ab\n", max_size=24)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


@given(letters, stops, st.lists(st.integers(0, 100), max_size=12))
@example("xabcd", ["abcd", "bc"], [])
@example("abab", ["abab", "ba"], [1, 2, 3])
@example("aab", ["ab"], [1])
def test_released_text_is_the_cut_text_however_it_comes(text: str, stops: list[str], borders: list[int]):
    matcher = StopMatcher(StopAutomaton(stops))
    released = "".join(matcher.feed(piece) for piece in pieces_of(text, borders))
    expected, is_cut = cut_whole(text, stops)
    assert matcher.is_matched == is_cut
    assert released + matcher.flush() == expected


@given(letters, stops, st.lists(st.integers(0, 100), max_size=12))
def test_nothing_that_may_become_a_stop_string_is_shown_and_nothing_else_is_held(
    text: str, stops: list[str], borders: list[int]
):
    matcher = StopMatcher(StopAutomaton(stops))
    seen = shown = ""
    for piece in pieces_of(text, borders):
        seen += piece
        shown += matcher.feed(piece)
        if matcher.is_matched:
            break
        assert shown == seen[: len(seen) - could_become_stop(seen, stops)]


def test_after_a_match_nothing_is_released():
    matcher = StopMatcher(StopAutomaton(["END"]))
    assert matcher.feed("one END two") == "one "
    assert matcher.feed(" three") == ""
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabcd", ["abcd", "bcd"], "x"),
        ("aaaa", ["aa"], ""),
        ("a😀b", ["😀"], "a"),
        ("no stop here", ["zzz"], "no stop here"),
    ],
)
def test_which_stop_string_wins(text: str, stops: list[str], kept: str):
    for size in (1, 2, len(text)):
        matcher = StopMatcher(StopAutomaton(stops))
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert "".join(map(matcher.feed, parts)) + matcher.flush() == kept


def test_a_long_overlapping_set_takes_linear_time():
    """Each character costs a bounded number of transitions, also where thousands of suffixes almost match."""
    automaton = StopAutomaton(["a" * 255 + "b", "a" * 200 + "c"])
    matcher = StopMatcher(automaton)
    assert matcher.feed("a" * 100_000) == "a" * (100_000 - 255)
    assert matcher.feed("b") == ""
    assert matcher.is_matched
