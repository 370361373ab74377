"""`CPUPagePool`: host memory for the pages of preempted requests.

Accounts on the loop thread (`arena`, as for device pages: promised, held, free); `store` and `load` on the executor.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mstar.engine.resources.host_pool import HostPool
from mstar.engine.resources.page_arena import PageArena


class CPUPagePool:
    """Room for `num_pages` pages. `like`: the device's K or V, `[layers, pages, page_size, kv_heads, head_dim]`."""

    def __init__(self, num_pages: int, num_handles: int, like: Tensor) -> None:
        self.arena = PageArena(num_pages + 1, num_handles)
        self._k = HostPool(num_pages, like)
        self._v = HostPool(num_pages, like)

    @property
    def num_pages(self) -> int:
        """Pages that requests can own; the arena's page 0 is nobody's here as well."""
        return self.arena.allocator.num_pages - 1

    def store(self, k: Tensor, v: Tensor, src: np.ndarray, dst: np.ndarray) -> None:
        """Device pages `src` to host pages `dst`."""
        self._k.store(k, src, dst)
        self._v.store(v, src, dst)

    def load(self, k: Tensor, v: Tensor, src: np.ndarray, dst: np.ndarray) -> None:
        """Host pages `src` to device pages `dst`."""
        self._k.load(k, src, dst)
        self._v.load(v, src, dst)
