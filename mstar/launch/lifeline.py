"""Ties a child process to its parent: it dies when the parent does, however the parent ends.

Two mechanisms, because each has a gap: the kernel's parent-death signal is lost when the parent is gone before it is
asked for, and the pipe is no help to a process whose threads are all stopped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import BinaryIO, Final

_PR_SET_PDEATHSIG: Final = 1
ORPHANED: Final = 86
"""Exit code of a process whose parent has gone."""


def die_with_parent(parent_pid: int, pipe: BinaryIO) -> None:
    """Call once, early, on the main thread. `pipe` is open for as long as the parent lives."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(ORPHANED)
    threading.Thread(target=_watch, args=(pipe.fileno(),), name="lifeline", daemon=True).start()


def _watch(fd: int) -> None:
    while os.read(fd, 4096):
        pass
    os._exit(ORPHANED)
