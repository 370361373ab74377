"""`DeviceOp`: a change of a cache's pages that the control plane has ordered and the executor carries out.

Queued on the loop thread, run in order before the next forward of a node that owns the cache: what is ordered first is
done first, so pages may change hands as soon as the order is given.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

NO_PAGES = np.empty(0, np.int32)


class DeviceOp(NamedTuple):
    """`offload`: device pages `src` are copied to host pages `dst`. `reload`: host pages `src` to device pages `dst`.
    `poison`: device pages `dst` are filled with NaN. Each int32 [pages]."""

    kind: Literal["offload", "reload", "poison"]
    src: np.ndarray
    dst: np.ndarray
