"""Who owns a file: the process that holds its lock, which the kernel lets go however that process ends. No torch."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_own(path: Path, create: bool = False) -> int | None:
    """A descriptor that holds the lock of the file at `path`; closing it lets the lock go.

    None: the file is not there (with `create`: already there), belongs to another user, or its owner lives.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened = os.fstat(fd)
        # The file may have been removed, or another put there, between its opening and the lock.
        if opened.st_ino == path.lstat().st_ino and opened.st_uid == os.getuid():
            return fd
    except OSError:
        pass  # locked by its owner, or gone
    os.close(fd)
    return None
