"""`PageAllocator`: which pages of a pool are free, and how many owners the others have.

Host integers only, loop thread. Pages are numbers; who stores what in them is not its business. Page 0 is the sink:
padding rows write there, nobody owns it.
"""

from __future__ import annotations

import numpy as np

SINK_PAGE = 0


class PageAllocator:
    """LIFO stack of free pages (a page freed last is warm in the cache) and an owner count per page.

    `num_pages` counts the sink. `owners` int32 [num_pages]; a page with owners is not free, one without is.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a page pool needs the sink page and at least one more, not {num_pages} pages")
        self.num_pages = num_pages
        self.owners = np.zeros(num_pages, np.int32)
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_owned(self) -> int:
        """Pages with at least one owner, shared pages counted once."""
        return self.num_pages - 1 - self._num_free

    def take(self, count: int) -> np.ndarray:
        """`count` free pages, int32, each with one owner from now on.

        Raises:
            MemoryError: fewer are free; nothing has changed.
        """
        if count > self._num_free:
            raise MemoryError(f"{count} pages asked, {self._num_free} free")
        self._num_free -= count
        pages = self._stack[self._num_free : self._num_free + count].copy()
        self.owners[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One more owner for each of these pages (distinct, all owned)."""
        owners = self.owners[pages]
        if owners.size and owners.min() < 1:
            raise ValueError(f"pages without an owner cannot be shared: {pages[owners < 1].tolist()}")
        self.owners[pages] = owners + 1

    def release(self, pages: np.ndarray) -> np.ndarray:
        """One owner less for each of these pages (distinct); returns those that became free.

        Raises:
            ValueError: a page has no owner (a double free); nothing has changed.
        """
        left = self.owners[pages] - 1
        if left.size and left.min() < 0:
            raise ValueError(f"pages released without an owner: {pages[left < 0].tolist()}")
        self.owners[pages] = left
        freed = pages[left == 0]
        self._stack[self._num_free : self._num_free + freed.size] = freed
        self._num_free += freed.size
        return freed

    def check(self) -> None:
        """Conservation: the stack holds exactly the pages without owners, each once, never the sink."""
        free = np.sort(self._stack[: self._num_free])
        expected = np.flatnonzero(self.owners == 0)[1:]
        if self.owners[SINK_PAGE] != 0 or not np.array_equal(free, expected):
            raise AssertionError(f"page pool out of balance: free {free.tolist()}, without owner {expected.tolist()}")
