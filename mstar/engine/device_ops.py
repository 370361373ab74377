"""`DeviceOp`: a change of pages or state slots that the control plane has ordered and the executor carries out.

Queued on the loop thread, run in order before the next forward of a node that owns them: what is ordered first is done
first, so pages and slots may change hands as soon as the order is given.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

NO_PAGES = np.empty(0, np.int32)


class DeviceOp(NamedTuple):
    """`offload`: device pages `src` are copied to host pages `dst`. `reload`: host pages `src` to device pages `dst`.
    `restore`: device slots `src` to device slots `dst`. `poison`: device pages `dst` are filled with NaN. Each int32
    [pages], or slots."""

    kind: Literal["offload", "reload", "restore", "poison"]
    src: np.ndarray
    dst: np.ndarray
