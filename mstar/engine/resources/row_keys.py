"""`RowKeys`: the page keys of a cache's rows, and which of their pages are sealed. Loop thread, host integers.

A key names what a page will hold once its tokens are computed; sealing the page says that it does, so that other rows
find it by its key.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mstar.engine.device_ops import NO_PAGES
from mstar.engine.resources.base import OpenConfig
from mstar.engine.resources.cache_policy import CachePolicy
from mstar.engine.resources.cache_stream import CacheStreams
from mstar.engine.resources.page_arena import PageArena
from mstar.engine.resources.page_keys import chain_keys, salted

ReadTokenIds = Callable[[int, int, int], np.ndarray]
"""(handle, begin, end): ids of a row's tokens at these positions, prompt and drawn ones: int32 [end - begin]."""

_ANY_NUMBER = np.iinfo(np.int32).max


class RowKeys:
    """`read_token_ids`: set at load where pages with drawn tokens are sealed too."""

    def __init__(self, arena: PageArena, streams: CacheStreams) -> None:
        num_handles = arena.held.size
        self.read_token_ids: ReadTokenIds | None = None
        self._arena = arena
        self._streams = streams
        self._page_size = streams.page_size
        self._keys: dict[int, list[bytes]] = {}
        self._configs: dict[int, tuple[OpenConfig, bytes]] = {}
        self._sealed = np.zeros(num_handles, np.int32)
        self._sealable = np.zeros(num_handles, np.int32)

    def introduce(self, handle: int, config: OpenConfig, policy: CachePolicy) -> None:
        """Chain the keys of the prompt's full pages, once. A prompt whose pages depend on more than is known here has
        none."""
        unnamed = policy.reads_inputs and config.has_inputs and not config.media
        if policy.root is None or config.prompt_ids is None or unnamed or not config.shares:
            return
        root = salted(policy.root, config.cache_salt)
        keys = chain_keys(root, config.prompt_ids, self._page_size, config.media)
        self._keys[handle] = keys
        self._sealable[handle] = len(keys)
        if self.read_token_ids is not None:
            self._configs[handle] = config, root
            self._sealable[handle] = _ANY_NUMBER

    def has_keys(self, handle: int) -> bool:
        """Pages of its prompt may be shared."""
        return bool(self._keys.get(handle))

    def seals_drawn(self, handle: int) -> bool:
        """Pages with tokens that it draws may be shared."""
        return handle in self._configs

    def key(self, handle: int, num_pages: int) -> bytes | None:
        """The key of the last of the row's first `num_pages` (one at least); None: it has none, or not yet."""
        keys = self._keys.get(handle)
        return None if keys is None or num_pages > len(keys) else keys[num_pages - 1]

    def match(self, handle: int, num_tokens: int) -> np.ndarray:
        """Indexed pages that go on behind the row's own, none of them past its first `num_tokens`: int32."""
        keys = self._keys.get(handle)
        if not keys:
            return NO_PAGES
        end = min(num_tokens // self._page_size, len(keys))
        return self._arena.index.match(keys, int(self._arena.held[handle]), end)

    def adopted(self, handle: int, num_pages: int) -> None:
        """The row's first `num_pages` are sealed pages, its own or others'."""
        self._sealed[handle] = num_pages

    def seal(self, handles: np.ndarray, ends: np.ndarray) -> None:
        """Rows have computed their tokens up to `ends` int32 [rows], and may have gone on since."""
        full = np.minimum(ends // self._page_size, self._sealable[handles])
        for index in (full > self._sealed[handles]).nonzero()[0].tolist():
            self._seal(int(handles[index]), int(full[index]))

    def released(self, handle: int) -> None:
        """The row has given up its pages; it may come back."""
        self._sealed[handle] = 0

    def close(self, handle: int) -> None:
        self._sealed[handle] = 0
        self._sealable[handle] = 0
        self._keys.pop(handle, None)
        self._configs.pop(handle, None)

    def _seal(self, handle: int, num_full: int) -> None:
        keys = self._keys[handle]
        if num_full > len(keys):
            self._extend(handle, keys, num_full)
        begin = int(self._sealed[handle])
        pages = self._streams.table[handle, begin:num_full].tolist()
        self._arena.seal(pages, keys[begin:num_full], keys[begin - 1] if begin else None)
        self._sealed[handle] = num_full

    def _extend(self, handle: int, keys: list[bytes], num_pages: int) -> None:
        """Keys of pages with drawn tokens."""
        assert self.read_token_ids is not None
        config, root = self._configs[handle]
        begin = len(keys) * self._page_size
        ids = self.read_token_ids(handle, begin, num_pages * self._page_size)
        keys.extend(chain_keys(keys[-1] if keys else root, ids, self._page_size, config.media, begin))
