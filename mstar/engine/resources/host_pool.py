"""`HostPool`: copies in host memory of some of a pool's pages or state slots. Executor; keeps no accounts of them.

Nothing here waits for the device. torch copies between a device and the host without a temporary, and so without
waiting, only what is in one piece at both ends. So a page is one piece on the host, with all its layers, and on its way
it goes through a buffer on the device of the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mstar.engine.host_columns import to_device
from mstar.engine.resources.page_tensors import pinned_zeros, zeros

STAGING_BYTES = 16 << 20
"""Of the buffer on a device, at most, but at least a page: what moves at once."""


class HostPool:
    """Room for host pages 1 to `num_pages` (page 0 is nobody's and takes no memory) of a pool `like`, `[layers, pages,
    *shape]`. `staging_bytes`: as `STAGING_BYTES`; 0, as for a pool on a CPU: pages are copied directly.

    Everything is in order of one stream, that of the forwards: who reuses a host page, or the buffer, does it later on
    the device as well; and the host itself never looks at either."""

    def __init__(self, num_pages: int, like: Tensor, staging_bytes: int | None = None) -> None:
        on_host = like.device.type == "cpu"
        if staging_bytes is None:
            staging_bytes = 0 if on_host else STAGING_BYTES
        layers, _, *shape = like.shape
        rows = (num_pages, layers, *shape)
        self.rows = zeros(rows, like.dtype, like.device) if on_host else pinned_zeros(rows, like.dtype)
        """`[num_pages, layers, *shape]`: host pages from 1 on."""
        self._buffer: Tensor | None = None
        if staging_bytes:
            num_staged = min(max(staging_bytes // self.rows[0].nbytes, 1), num_pages)
            self._buffer = like.new_empty((num_staged, layers, *shape))

    def store(self, pool: Tensor, src: np.ndarray, dst: np.ndarray) -> None:
        """Pages `src` of `pool` to host pages `dst`, distinct; int32 [pages]."""
        if self._buffer is None:
            for page, row in zip(src.tolist(), (dst - 1).tolist(), strict=True):
                self.rows[row].copy_(pool[:, page])
            return
        for part in self._parts(src.size, self._buffer):
            index, staged = to_device(src[part].astype(np.int64), pool.device), self._buffer[: part.stop - part.start]
            torch.index_select(pool.transpose(0, 1), 0, index, out=staged)
            for here, there in _runs(dst[part] - 1):
                self.rows[there].copy_(staged[here], non_blocking=True)

    def load(self, pool: Tensor, src: np.ndarray, dst: np.ndarray) -> None:
        """Host pages `src` to pages `dst` of `pool`, distinct; int32 [pages]."""
        if self._buffer is None:
            for row, page in zip((src - 1).tolist(), dst.tolist(), strict=True):
                pool[:, page].copy_(self.rows[row])
            return
        for part in self._parts(src.size, self._buffer):
            index, staged = to_device(dst[part].astype(np.int64), pool.device), self._buffer[: part.stop - part.start]
            for here, there in _runs(src[part] - 1):
                staged[here].copy_(self.rows[there], non_blocking=True)
            pool.transpose(0, 1).index_copy_(0, index, staged)

    def _parts(self, count: int, buffer: Tensor) -> Iterator[slice]:
        """`count` pages in pieces that the buffer holds."""
        for begin in range(0, count, len(buffer)):
            yield slice(begin, min(begin + len(buffer), count))


def _runs(rows: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Where in `rows` int32 [pages] successive numbers stand, and from which to which they go."""
    borders = [0, *((np.diff(rows) != 1).nonzero()[0] + 1).tolist(), rows.size]
    for begin, end in pairwise(borders):
        first = int(rows[begin])
        yield slice(begin, end), slice(first, first + end - begin)
