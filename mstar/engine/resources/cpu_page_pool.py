"""`CPUPagePool`: host memory for the pages of preempted requests, page by page like the device's.

Accounts on the loop thread (`arena`, as for device pages: promised, held, free); `store` and `load` on the executor.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.page_arena import PageArena
from mstar.engine.resources.page_tensors import zeros


class CPUPagePool:
    """Room for `num_pages` pages. `like`: the device's K or V, `[layers, pages, page_size, kv_heads, head_dim]`."""

    def __init__(self, num_pages: int, num_handles: int, like: Tensor) -> None:
        self.arena = PageArena(num_pages + 1, num_handles)
        shape = (like.shape[0], num_pages + 1, *like.shape[2:])
        pinned = like.device.type != "cpu"
        self._k = zeros(shape, like.dtype, torch.device("cpu"), pinned=pinned)
        self._v = zeros(shape, like.dtype, torch.device("cpu"), pinned=pinned)

    @property
    def num_pages(self) -> int:
        """Pages that requests can own; the arena's page 0 is nobody's here as well."""
        return self.arena.allocator.num_pages - 1

    def store(self, k: Tensor, v: Tensor, src: np.ndarray, dst: np.ndarray) -> None:
        """Device pages `src` to host pages `dst`."""
        _copy(k, self._k, src, dst)
        _copy(v, self._v, src, dst)

    def load(self, k: Tensor, v: Tensor, src: np.ndarray, dst: np.ndarray) -> None:
        """Host pages `src` to device pages `dst`."""
        _copy(self._k, k, src, dst)
        _copy(self._v, v, src, dst)


def _copy(source: Tensor, target: Tensor, src: np.ndarray, dst: np.ndarray) -> None:
    for begin, end in zip(src.tolist(), dst.tolist(), strict=True):
        target[:, end].copy_(source[:, begin], non_blocking=True)  # only the stream reads it back
