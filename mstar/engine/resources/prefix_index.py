"""`PrefixIndex`: which page holds the tokens that a key names, and which of those pages no request owns.

Loop thread, host only. It owns no page by itself: `PageArena` keeps the owners, and is the only one that calls here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np


class PrefixIndex:
    """`indexed` bool [num_pages]. A *cached* page is indexed and no request's: it may be adopted or evicted. `on_evict`
    is told of the key of a page that is evicted.

    Cached pages lie in the order in which they were last let go. A request lets its pages go deepest first, so the
    oldest page never has an indexed page behind it that nobody uses.
    """

    def __init__(self, num_pages: int) -> None:
        self.indexed = np.zeros(num_pages, np.bool_)
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, tuple[bytes, bytes | None]] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.on_evict: Callable[[bytes], None] | None = None

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def match(self, keys: Sequence[bytes], begin: int, end: int) -> np.ndarray:
        """Pages of `keys[begin:end]`, up to the first that is not indexed: int32."""
        found: list[int] = []
        for index in range(begin, end):
            page = self._pages.get(keys[index])
            if page is None:
                break
            found.append(page)
        return np.array(found, np.int32)

    def put(self, page: int, key: bytes, parent: bytes | None) -> bool:
        """`page`, which a request owns, holds what `key` names, behind the page of `parent`. False: another page holds
        the same already, and this one stays its request's own."""
        if key in self._pages:
            return False
        if self.indexed[page]:
            raise ValueError(f"page {page} is indexed under two keys")
        self._pages[key] = page
        self._keys[page] = (key, parent)
        self.indexed[page] = True
        return True

    def use(self, pages: Iterable[int]) -> None:
        """Requests own these pages from now on."""
        for page in pages:
            self._cached.pop(page, None)

    def let_go(self, pages: Sequence[int]) -> None:
        """No request owns these indexed pages any more: pages of one request, deepest first."""
        if not pages:
            return
        self._cached.update(dict.fromkeys(pages))
        # A page of this chain may be another request's earlier work: it must not be older than what lies behind it.
        parent = self._keys[pages[0]][1]
        while parent is not None:
            page = self._pages.get(parent)
            if page is None:
                return
            if page in self._cached:
                self._cached.move_to_end(page)
            parent = self._keys[page][1]

    def evict(self) -> int:
        """Forget the oldest cached page. Raises `KeyError` when there is none."""
        page, _ = self._cached.popitem(last=False)
        key, _ = self._keys.pop(page)
        del self._pages[key]
        self.indexed[page] = False
        if self.on_evict is not None:
            self.on_evict(key)
        return page

    def check(self, owners: np.ndarray) -> None:
        """`owners` int32 [num_pages], the index counted: cached pages are exactly those that only the index owns."""
        expected = set(np.flatnonzero(self.indexed & (owners == 1)).tolist())
        if set(self._cached) != expected:
            raise AssertionError(f"cached pages {sorted(self._cached)}, owned by the index alone {sorted(expected)}")
        if {key: page for page, (key, _) in self._keys.items()} != self._pages:
            raise AssertionError("keys and pages of the prefix index do not match")
        if set(self._keys) != set(np.flatnonzero(self.indexed).tolist()) or (owners[self.indexed] < 1).any():
            raise AssertionError("the prefix index names pages that it does not own")
