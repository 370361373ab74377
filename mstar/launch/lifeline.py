"""Ties a child process to its parent: it dies when the parent does, however the parent ends.

Two mechanisms, because each has a gap: the kernel's parent-death signal is lost when the parent is gone before it is
asked for, and the pipe is no help to a process whose threads are all stopped.
"""

from __future__ import annotations

import os
import threading
from typing import BinaryIO

from mstar.platforms.parent_death import ORPHANED, die_with_parent


def hold_lifeline(parent_pid: int, pipe: BinaryIO) -> None:
    """Call once, early, on the main thread. `pipe` is open for as long as the parent lives."""
    die_with_parent(parent_pid)
    threading.Thread(target=_watch, args=(pipe.fileno(),), name="lifeline", daemon=True).start()


def _watch(fd: int) -> None:
    while os.read(fd, 4096):
        pass
    os._exit(ORPHANED)
