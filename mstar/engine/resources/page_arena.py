"""`PageArena`: the only way to get a page. Keeps promises: a request that was admitted never runs out of room.

Loop thread, host integers. The arena owns the allocator and the accounts per handle; the block table that says which
page is where belongs to `CacheStreams`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mstar.engine.resources.page_allocator import PageAllocator


class Acquired(NamedTuple):
    """`pages` int32, those of the first handle first. `refused` bool per handle: set when nothing was acquired."""

    pages: np.ndarray
    refused: np.ndarray | None


class PageArena:
    """`promised` and `held` int32 [handles]: pages a handle may count on, and pages it has."""

    def __init__(self, num_pages: int, num_handles: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.promised = np.zeros(num_handles, np.int32)
        self.held = np.zeros(num_handles, np.int32)
        self._outstanding = 0

    @property
    def num_unpromised(self) -> int:
        """Free pages that nobody counts on."""
        return self.allocator.num_free - self._outstanding

    def promise(self, handle: int, num_pages: int) -> bool:
        """Replace the handle's promise; False (and no change) when free pages do not cover it."""
        before = max(int(self.promised[handle] - self.held[handle]), 0)
        after = max(num_pages - int(self.held[handle]), 0)
        if after - before > self.num_unpromised:
            return False
        self.promised[handle] = num_pages
        self._outstanding += after - before
        return True

    def acquire(self, handles: np.ndarray, counts: np.ndarray) -> Acquired:
        """`counts[i]` more pages for each handle (distinct), or for none: then `refused` names the handles, in order,
        whose turn came when unpromised pages had run out."""
        covered = np.minimum(np.maximum(self.promised[handles] - self.held[handles], 0), counts)
        extra = counts - covered
        if extra.any():
            refused = (np.cumsum(extra) > self.num_unpromised) & (extra > 0)
            if refused.any():
                return Acquired(np.empty(0, np.int32), refused)
        pages = self.allocator.take(int(counts.sum()))
        self.held[handles] += counts
        self._outstanding -= int(covered.sum())
        return Acquired(pages, None)

    def give_back(self, handles: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """Undo an `acquire`: the pages are free again, the promises as large as before."""
        self.allocator.release(pages)
        before = np.maximum(self.promised[handles] - self.held[handles], 0)
        self.held[handles] -= counts
        self._outstanding += int((np.maximum(self.promised[handles] - self.held[handles], 0) - before).sum())

    def forget(self, handle: int, pages: np.ndarray) -> np.ndarray:
        """The handle leaves, with its pages and its promise. Returns the pages that became free."""
        self._outstanding -= max(int(self.promised[handle] - self.held[handle]), 0)
        self.promised[handle] = 0
        self.held[handle] = 0
        return self.allocator.release(pages)

    def check(self) -> None:
        """Conservation of pages, and of promises: they are covered by free pages."""
        self.allocator.check()
        outstanding = int(np.maximum(self.promised - self.held, 0).sum())
        if outstanding != self._outstanding or outstanding > self.allocator.num_free:
            raise AssertionError(
                f"promises out of balance: {outstanding} by handle, {self._outstanding} counted, "
                f"{self.allocator.num_free} pages free"
            )
