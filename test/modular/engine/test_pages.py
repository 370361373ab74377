"""Pages: conservation after every operation, promises that hold, transactions that leave no trace."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.cache_stream import CacheStreams, token_positions
from mstar.engine.resources.page_allocator import PageAllocator
from mstar.engine.resources.page_arena import PageArena


def test_allocator_is_last_in_first_out_and_never_gives_the_sink():
    pages = PageAllocator(6)
    first = pages.take(5)
    assert sorted(first.tolist()) == [1, 2, 3, 4, 5]
    pages.release(first[[1]])
    pages.release(first[[3]])
    assert pages.take(1).tolist() == [first[3]]
    with pytest.raises(MemoryError):
        pages.take(2)
    assert pages.num_free == 1
    pages.check()


def test_a_shared_page_is_freed_by_its_last_owner():
    pages = PageAllocator(4)
    taken = pages.take(2)
    pages.share(taken[:1])
    assert pages.num_owned == 2
    assert pages.release(taken).tolist() == [taken[1]]
    assert pages.release(taken[:1]).tolist() == [taken[0]]
    with pytest.raises(ValueError, match="without an owner"):
        pages.release(taken[:1])
    with pytest.raises(ValueError, match="cannot be shared"):
        pages.share(taken[:1])
    pages.check()


def test_a_corrupted_pool_is_noticed():
    pages = PageAllocator(4)
    taken = pages.take(2)
    pages.owners[taken[0]] = 0
    with pytest.raises(AssertionError, match="out of balance"):
        pages.check()


def test_promised_pages_are_not_given_to_others():
    arena = PageArena(11, 4)
    assert arena.promise(0, 6)
    assert not arena.promise(1, 5)
    assert arena.promise(1, 4)
    got = arena.acquire(np.array([2]), np.array([1]))
    assert got.refused is not None and got.refused.tolist() == [True]
    assert arena.acquire(np.array([0, 1]), np.array([6, 4])).refused is None
    arena.check()


def test_refusal_names_the_rows_whose_turn_came_too_late():
    arena = PageArena(6, 4)
    assert arena.promise(1, 2)
    got = arena.acquire(np.array([0, 1, 2, 3]), np.array([2, 2, 2, 0]))
    assert got.refused is not None
    assert got.refused.tolist() == [False, False, True, False]
    assert arena.held.sum() == 0  # nothing was taken for the others either
    arena.check()


def test_a_promise_can_be_changed_and_withdrawn():
    arena = PageArena(11, 2)
    assert arena.promise(0, 10)
    assert arena.promise(0, 3)
    assert arena.promise(1, 7)
    assert not arena.promise(0, 4)
    assert arena.promised[0] == 3
    assert arena.promise(1, 0)
    assert arena.num_unpromised == 7
    arena.check()


class ArenaMachine(RuleBasedStateMachine):
    """Random promises, growth, roll-backs and departures, against sets of pages kept by hand."""

    handles = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.total = 17
        self.arena = PageArena(self.total + 1, 5)
        self.streams = CacheStreams(5, 20, 4)
        self.pages: list[list[int]] = [[] for _ in range(5)]
        self.promised = [0] * 5
        self.open: list[tuple[list[int], list[int], np.ndarray]] = []

    @rule(handle=handles, count=st.integers(0, 12))
    def promise(self, handle: int, count: int) -> None:
        granted = self.arena.promise(handle, count)
        needed = [max(p - len(held), 0) for p, held in zip(self.promised, self.pages, strict=True)]
        needed[handle] = max(count - len(self.pages[handle]), 0)
        assert granted == (sum(needed) <= self.total - sum(map(len, self.pages)))
        if granted:
            self.promised[handle] = count

    @precondition(lambda self: not self.open)
    @rule(rows=st.lists(st.tuples(handles, st.integers(0, 4)), min_size=1, max_size=5, unique_by=lambda r: r[0]))
    def grow(self, rows: list[tuple[int, int]]) -> None:
        handles, counts = np.array([r[0] for r in rows]), np.array([r[1] for r in rows], np.int32)
        held = self.arena.held[handles].copy()
        got = self.arena.acquire(handles, counts)
        extra = [
            max(len(self.pages[h]) + c - max(self.promised[h], len(self.pages[h])), 0) if c else 0 for h, c in rows
        ]
        outstanding = sum(max(p - len(held), 0) for p, held in zip(self.promised, self.pages, strict=True))
        fits = sum(extra) <= self.total - sum(map(len, self.pages)) - outstanding
        assert (got.refused is None) == fits
        if got.refused is not None:
            assert got.refused.any()
            return
        self.streams.append(handles, held, counts, got.pages)
        for handle, count in rows:
            begin = len(self.pages[handle])
            self.pages[handle] += self.streams.table[handle, begin : begin + count].tolist()
        self.open.append(([r[0] for r in rows], [r[1] for r in rows], got.pages))

    @precondition(lambda self: self.open)
    @rule(keep=st.booleans())
    def close_transaction(self, keep: bool) -> None:
        rows, counts, pages = self.open.pop()
        if keep:
            return
        handles, sizes = np.array(rows), np.array(counts, np.int32)
        held = self.arena.held[handles] - sizes
        self.streams.cut(handles, held, sizes)
        self.arena.give_back(handles, sizes, pages)
        for handle, count in zip(rows, counts, strict=True):
            del self.pages[handle][len(self.pages[handle]) - count :]

    @rule(handle=handles)
    def leave(self, handle: int) -> None:
        if any(handle in rows for rows, _, _ in self.open):
            return
        self.arena.forget(handle, self.streams.clear(handle, int(self.arena.held[handle])))
        self.pages[handle], self.promised[handle] = [], 0

    @invariant()
    def balanced(self) -> None:
        self.arena.check()
        owned = [page for pages in self.pages for page in pages]
        assert len(set(owned)) == len(owned) and 0 not in owned
        assert self.arena.allocator.num_free + len(owned) == self.total
        for handle, pages in enumerate(self.pages):
            row = self.streams.table[handle]
            assert row[: len(pages)].tolist() == pages and not row[len(pages) :].any()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(stateful_step_count=25)


def test_token_positions_continue_each_row():
    lengths, spans = np.array([5, 0, 9], np.int32), np.array([2, 3, 0], np.int32)
    assert token_positions(lengths, spans).tolist() == [5, 6, 0, 1, 2]
    assert token_positions(lengths[:0], spans[:0]).tolist() == []


@pytest.mark.parametrize("width", [4, 3])
def test_rows_of_the_block_table_are_copied_as_far_as_there_is_room(width: int):
    streams = CacheStreams(num_handles=5, max_pages=4, page_size=16)
    streams.table[:] = np.arange(20).reshape(5, 4)
    staged = np.full((3, width), -1, np.int32)
    streams.copy_rows(np.array([3, 1]), staged[:2])
    assert staged.tolist() == [[12, 13, 14, 15][:width], [4, 5, 6, 7][:width], [-1] * width]
