"""`CacheStreams`: the block table. One row per request: the pages of its cache in order, and its length in tokens.

Loop thread, host integers; all operations take columns of handles. The last row belongs to the sink.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class CacheStream(NamedTuple):
    """One request's cache at a moment: `pages` int32 in order, `length` in tokens. For inspection, not for steps."""

    handle: int
    length: int
    pages: np.ndarray


class CacheStreams:
    """`table` int32 [handles, max_pages]; entries past a row's pages are the sink page. `lengths` int32 [handles]."""

    def __init__(self, num_handles: int, max_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.max_pages = max_pages
        self.table = np.zeros((num_handles, max_pages), np.int32)
        self.lengths = np.zeros(num_handles, np.int32)

    def append(self, handles: np.ndarray, held: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """Put `counts[i]` new pages behind the `held[i]` pages of each handle."""
        if pages.size == handles.size and np.logical_and.reduce(counts == 1):
            self.table[handles, held] = pages
        else:
            self.table[_spread(handles, held, counts)] = pages

    def cut(self, handles: np.ndarray, held: np.ndarray, counts: np.ndarray) -> None:
        """Undo `append`."""
        self.table[_spread(handles, held, counts)] = 0

    def copy_rows(self, handles: np.ndarray, out: np.ndarray) -> None:
        """The rows of `handles` into `out` int32 [rows, pages], as far as it is wide."""
        if out.shape[1] == self.max_pages:
            self.table.take(handles, 0, out, "clip")  # unlike "raise", without a copy in between
        else:
            out[:] = self.table[handles, : out.shape[1]]

    def slots(self, handles: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Cache slot (page × page_size + offset) of token `positions[i]` of `handles[i]`; the pages must be there."""
        page, offset = np.divmod(positions, self.page_size)
        return self.table[handles, page] * self.page_size + offset

    def clear(self, handle: int, held: int) -> np.ndarray:
        """Empty the row; returns its pages."""
        pages = self.table[handle, :held].copy()
        self.table[handle, :held] = 0
        self.lengths[handle] = 0
        return pages


def token_positions(lengths: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Positions of `spans[i]` tokens that continue `lengths[i]`, all rows packed: int32 [sum of spans]."""
    ends = spans.cumsum(dtype=np.int32)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total, dtype=np.int32) + (lengths - ends + spans).repeat(spans)


def _spread(handles: np.ndarray, held: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Table index of each new page: (row, column)."""
    return np.repeat(handles, counts), token_positions(held, counts)
