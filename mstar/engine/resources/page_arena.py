"""`PageArena`: the only way to get a page. Keeps promises: what a request was promised is there when it is needed.

Loop thread, host integers. The arena owns the allocator, the prefix index and the accounts per handle; the block table
that says which page is where belongs to `CacheStreams`. A page is free, or owned by requests, or *cached*: indexed and
nobody's. Cached pages count as room: `acquire` evicts them when free pages run out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mstar.engine.device_ops import NO_PAGES
from mstar.engine.resources.page_allocator import PageAllocator
from mstar.engine.resources.prefix_index import PrefixIndex


class Acquired(NamedTuple):
    """`pages` int32, those of the first handle first. `refused` bool per handle: set when nothing was acquired; all of
    them together lack `missing` pages."""

    pages: np.ndarray
    refused: np.ndarray | None
    missing: int = 0


class PageArena:
    """`promised` and `held` int32 [handles]: pages a handle may count on, and pages it has, shared ones included.
    `on_free` is told of pages whose contents nobody may read any more."""

    def __init__(self, num_pages: int, num_handles: int, on_free: Callable[[np.ndarray], None] | None = None) -> None:
        self.allocator = PageAllocator(num_pages)
        self.index = PrefixIndex(num_pages)
        self.promised = np.zeros(num_handles, np.int32)
        self.held = np.zeros(num_handles, np.int32)
        self.num_evicted = 0
        self._outstanding = 0
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def num_cached(self) -> int:
        return self.index.num_cached

    @property
    def num_owned(self) -> int:
        """Pages that requests own, shared pages counted once."""
        return self.allocator.num_owned - self.num_cached

    @property
    def num_unpromised(self) -> int:
        """Free and cached pages that nobody counts on."""
        return self.allocator.num_free + self.index.num_cached - self._outstanding

    def covers(self, handle: int, num_pages: int, adopted: np.ndarray = NO_PAGES) -> bool:
        """Whether `promise` would be granted."""
        return self.lacking(handle, num_pages, adopted) <= 0

    def lacking(
        self,
        handle: int,
        num_pages: int,
        adopted: np.ndarray = NO_PAGES,
        leaving: Sequence[tuple[int, np.ndarray]] = (),
    ) -> int:
        """Pages by which `promise` would fall short; 0 or less: it would be granted. `leaving`: other handles with
        their pages; it is asked as if they had been forgotten."""
        held = int(self.held[handle])
        before = max(int(self.promised[handle]) - held, 0)
        after = max(num_pages - held - adopted.size, 0)
        owners = self.allocator.owners
        if leaving:
            owners = self._owners_without(leaving)
        no_longer_cached = int(np.count_nonzero(owners[adopted] == 1)) if adopted.size else 0
        return after - before + no_longer_cached - self.num_unpromised - self.gain(leaving)

    def gain(self, leaving: Sequence[tuple[int, np.ndarray]]) -> int:
        """By how much `num_unpromised` would grow if these handles, given with their pages, were forgotten."""
        if not leaving:
            return 0
        pages = np.unique(np.concatenate([pages for _, pages in leaving]))
        nobodys = int((self._owners_without(leaving)[pages] == self.index.indexed[pages]).sum())
        return nobodys + sum(self.owed(handle) for handle, _ in leaving)

    def promise(self, handle: int, num_pages: int, adopted: np.ndarray = NO_PAGES) -> bool:
        """Replace the handle's promise, and make it an owner of `adopted` (indexed pages, not its own yet), which count
        towards it. False, and no change, when free and cached pages do not cover that."""
        if not self.covers(handle, num_pages, adopted):
            return False
        self._outstanding -= self.owed(handle)
        if adopted.size:
            self.allocator.share(adopted)
            self.index.use(adopted.tolist())
            self.held[handle] += adopted.size
        self.promised[handle] = num_pages
        self._outstanding += self.owed(handle)
        return True

    def acquire(self, handles: np.ndarray, counts: np.ndarray) -> Acquired:
        """`counts[i]` more pages for each handle (distinct), or for none: then `refused` names the handles, in order,
        whose turn came when unpromised pages had run out."""
        held = self.held[handles]
        covered = np.minimum(np.maximum(self.promised[handles] - held, 0), counts)
        total, owed = int(np.add.reduce(counts)), int(np.add.reduce(covered))
        if owed < total:
            extra = counts - covered
            wanted, room = extra.cumsum(), self.num_unpromised
            refused = (wanted > room) & (extra > 0)
            if refused.any():
                return Acquired(NO_PAGES, refused, int(wanted[-1]) - room)
        if total > self.allocator.num_free:
            self._evict(total - self.allocator.num_free)
        pages = self.allocator.take(total)
        self.held[handles] = held + counts
        self._outstanding -= owed
        return Acquired(pages, None)

    def give_back(self, handles: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """Undo an `acquire`: the pages are free again, the promises as large as before."""
        self.allocator.release(pages)
        before = np.maximum(self.promised[handles] - self.held[handles], 0)
        self.held[handles] -= counts
        self._outstanding += int((np.maximum(self.promised[handles] - self.held[handles], 0) - before).sum())

    def seal(self, pages: Sequence[int], keys: Sequence[bytes], parent: bytes | None) -> None:
        """Consecutive pages of a request are full and will not change: others may find them. `parent`: key of the page
        before. Where another page holds the same already, this one stays private."""
        found: list[int] = []
        for page, key in zip(pages, keys, strict=True):
            if self.index.put(page, key, parent):
                found.append(page)
            parent = key
        if found:
            self.allocator.share(np.array(found))

    def forget(self, handle: int, pages: np.ndarray) -> None:
        """The handle gives up its promise and its pages, given in the order of its tokens. What is indexed stays as
        cached pages."""
        self._outstanding -= self.owed(handle)
        self.promised[handle] = 0
        self.held[handle] = 0
        deepest_first = pages[::-1]
        freed = self.allocator.release(deepest_first)
        only_indexed = self.index.indexed[deepest_first] & (self.allocator.owners[deepest_first] == 1)
        self.index.let_go(deepest_first[only_indexed].tolist())
        self._freed(freed)

    def num_sole(self, pages: np.ndarray) -> int:
        """How many of a request's pages no other request owns."""
        return int((self.allocator.owners[pages] - self.index.indexed[pages] == 1).sum())

    def owed(self, handle: int) -> int:
        """Pages that the handle was promised and does not have."""
        return max(int(self.promised[handle]) - int(self.held[handle]), 0)

    def check(self) -> None:
        """Conservation of pages, and of promises: they are covered by free and cached pages."""
        self.allocator.check()
        self.index.check(self.allocator.owners)
        if self.num_free + self.num_owned + self.num_cached != self.allocator.num_pages - 1:
            raise AssertionError("pages are neither free, owned nor cached")
        outstanding = int(np.maximum(self.promised - self.held, 0).sum())
        if outstanding != self._outstanding or self.num_unpromised < 0:
            raise AssertionError(
                f"promises out of balance: {outstanding} by handle, {self._outstanding} counted, "
                f"{self.num_free} pages free, {self.num_cached} cached"
            )

    def _owners_without(self, leaving: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
        owners = self.allocator.owners
        return owners - np.bincount(np.concatenate([pages for _, pages in leaving]), minlength=owners.size)

    def _evict(self, count: int) -> None:
        pages = np.array([self.index.evict() for _ in range(count)], np.int32)
        self.num_evicted += count
        self._freed(self.allocator.release(pages))

    def _freed(self, pages: np.ndarray) -> None:
        if self._on_free is not None and pages.size:
            self._on_free(pages)
