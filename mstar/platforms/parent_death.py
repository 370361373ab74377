"""Ties a process to the one that started it: the kernel kills it when its parent ends, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
ORPHANED: Final = 86
"""Exit code of a process whose parent has gone."""


def die_with_parent(parent_pid: int) -> None:
    """Call once, early, on the main thread. Where there is no such signal, only the start is looked at."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the signal was asked for
        os._exit(ORPHANED)
