"""Stream buffers: order, tags, overlap, giving back, committing; every id comes out exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mstar.streaming.buffer import StreamBuffer
from mstar.streaming.chunk_policy import ChunkPolicy, fixed, left_context, sliding


def filled(policy: ChunkPolicy, tags: str, end: bool = True) -> StreamBuffer:
    """Items 100, 101, ... with one tag per letter."""
    buffer = StreamBuffer(policy)
    for i, tag in enumerate(tags):
        buffer.put(100 + i, ord(tag))
    if end:
        buffer.end(len(tags))
    return buffer


def drain(buffer: StreamBuffer) -> list[list[int]]:
    chunks = []
    while buffer.has_chunk:
        chunks.append(buffer.take())
        buffer.commit()
    return chunks


def test_overlapping_windows_keep_items_until_they_have_passed() -> None:
    buffer = filled(sliding(4, 2), "aaaaaaa")
    assert buffer.take() == [100, 101, 102, 103]
    assert buffer.commit() == [100, 101]
    assert buffer.take() == [102, 103, 104, 105]
    assert buffer.num_held == 5
    assert buffer.commit() == [102, 103]
    assert not buffer.exhausted
    assert buffer.take() == [104, 105, 106]
    assert buffer.exhausted
    assert buffer.commit() == [104, 105, 106]
    assert buffer.num_held == 0


def test_a_chunk_never_spans_two_tags() -> None:
    """At a change of tag the policy ends, also its context, and begins anew."""
    buffer = filled(left_context(3, 2, first=1), "aaaaabbbb")
    chunks = drain(buffer)
    assert chunks == [[100], [100, 101, 102, 103], [102, 103, 104], [105], [105, 106, 107, 108]]


def test_a_tag_change_lets_the_remainder_go_before_the_end_is_known() -> None:
    buffer = filled(fixed(4), "aaab", end=False)
    assert buffer.next_tag == ord("a")
    assert buffer.take() == [100, 101, 102]
    assert buffer.next_tag == ord("b")
    assert not buffer.has_chunk
    buffer.put(104, ord("b"))
    buffer.end(5)
    assert buffer.take() == [103, 104]
    assert buffer.exhausted


def test_chunks_are_given_back_newest_first() -> None:
    buffer = filled(sliding(2, 1), "aabb")
    first = buffer.take()
    second = buffer.take()
    assert (first, second) == ([100, 101], [102, 103])
    buffer.give_back()
    assert buffer.take() == second
    assert buffer.commit() == [100, 101]


def test_giving_back_across_a_tag_change_after_a_commit() -> None:
    buffer = filled(sliding(2, 1), "aab")
    assert buffer.take() == [100, 101]
    assert buffer.take() == [102]
    assert buffer.commit() == [100, 101]
    buffer.give_back()
    assert buffer.take() == [102]


def test_an_empty_chunk_takes_nothing_and_keeps_its_place() -> None:
    buffer = filled(fixed(2), "aaaa")
    buffer.take()
    assert buffer.take_nothing() == []
    assert not buffer.idle
    assert buffer.commit() == [100, 101]
    assert buffer.commit() == []
    assert buffer.idle
    assert buffer.take() == [102, 103]


def test_the_end_may_be_known_before_the_items() -> None:
    buffer = StreamBuffer(fixed(2))
    buffer.end(2)
    assert not buffer.exhausted and buffer.next_tag is None
    buffer.put(1, 0)
    assert not buffer.has_chunk
    buffer.put(2, 0)
    assert buffer.take() == [1, 2]
    assert buffer.exhausted


def test_a_stream_without_items() -> None:
    buffer = StreamBuffer(fixed(2))
    buffer.end(0)
    assert buffer.exhausted and not buffer.has_chunk


def test_wrong_ends_are_refused() -> None:
    buffer = filled(fixed(2), "aa")
    buffer.end(2)  # the same again
    with pytest.raises(ValueError, match="cannot end after 3"):
        buffer.end(3)
    with pytest.raises(ValueError, match="item 2 of a stream that ended after 2"):
        buffer.put(5, 0)
    with pytest.raises(ValueError, match="cannot end after 1"):
        filled(fixed(2), "aa", end=False).end(1)


def test_clear_returns_what_is_held() -> None:
    buffer = filled(sliding(3, 1), "aaaaa", end=False)
    buffer.take()
    buffer.commit()
    buffer.take()
    assert buffer.clear() == [101, 102, 103, 104]
    assert buffer.num_held == 0 and buffer.idle


policies = st.sampled_from(
    [fixed(1), fixed(3), sliding(4, 1), sliding(5, 3), left_context(2, 4, first=1), left_context(3, 1), fixed(2, False)]
)


def cut(tags: str, policy: ChunkPolicy) -> list[list[int]]:
    """Chunks by a plain reading of the rules, item indices."""
    runs: list[list[int]] = []
    for i, tag in enumerate(tags):
        if i and tags[i - 1] == tag:
            runs[-1].append(i)
        else:
            runs.append([i])
    chunks = []
    for run in runs:
        at = 0
        while at < len(run):
            size = policy.first if policy.first is not None and at == 0 else policy.stride
            chunks.append(run[max(0, at - policy.context) : at + size])
            at += size
    return chunks


class BufferMachine(RuleBasedStateMachine):
    """Random arrivals, takes, give-backs and commits; with `hold_last` the chunks are those of the whole list."""

    @initialize(policy=policies, tags=st.text("ab", max_size=20))
    def begin(self, policy: ChunkPolicy, tags: str) -> None:
        self.tags = tags
        self.expected = cut(tags, policy)
        self.buffer = StreamBuffer(policy)
        self.arrived = 0
        self.next_chunk = 0
        self.taken: list[list[int]] = []
        self.returned: list[int] = []

    @rule()
    def put(self) -> None:
        if self.arrived < len(self.tags):
            self.buffer.put(self.arrived, ord(self.tags[self.arrived]))
            self.arrived += 1

    @rule()
    def end(self) -> None:
        self.buffer.end(len(self.tags))

    @precondition(lambda self: self.buffer.has_chunk)
    @rule()
    def take(self) -> None:
        chunk = self.buffer.take()
        assert chunk == self.expected[self.next_chunk]
        self.next_chunk += 1
        self.taken.append(chunk)

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self) -> None:
        self.buffer.give_back()
        if self.taken.pop():
            self.next_chunk -= 1

    @rule()
    def take_nothing(self) -> None:
        self.taken.append(self.buffer.take_nothing())

    @precondition(lambda self: self.taken)
    @rule()
    def commit(self) -> None:
        self.taken.pop(0)
        self.returned += self.buffer.commit()

    @invariant()
    def ids_come_out_once_and_in_order(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert self.returned == list(range(len(self.returned)))
        assert self.buffer.num_held == self.arrived - len(self.returned)
        assert all(one >= len(self.returned) for chunk in self.taken for one in chunk)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            assert self.returned + self.buffer.clear() == list(range(self.arrived))


TestBufferMachine = BufferMachine.TestCase


@given(policies, st.text("abc", max_size=30))
def test_a_whole_stream_is_cut_by_the_rules(policy: ChunkPolicy, tags: str) -> None:
    buffer = filled(policy, tags)
    assert [[one - 100 for one in chunk] for chunk in drain(buffer)] == cut(tags, policy)
    assert buffer.exhausted and buffer.num_held == 0
