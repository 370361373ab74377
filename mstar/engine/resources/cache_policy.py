"""`CachePolicy`: what may be done with the contents of one cache. Settled at load, by `mstar.engine.cache_reuse`."""

from __future__ import annotations

from typing import NamedTuple


class CachePolicy(NamedTuple):
    """`root` of the chains of page keys; None: no page is reused. `reads_inputs`: what reuses or rebuilds pages also
    reads graph inputs, so their bytes depend on more than token ids for a request that brings some. `recompute`: token
    ids rebuild the whole cache of any other row."""

    root: bytes | None = None
    reads_inputs: bool = False
    recompute: bool = False


NO_REUSE = CachePolicy()
