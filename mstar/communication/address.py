"""Where the processes of one instance meet: a private directory of sockets, and names that no other instance uses.

The supervisor makes an `InstanceDir` and its children compute their addresses from its path. Two servers of one user
coexist; what a killed one left behind is removed at the next start. No torch; runs at start and end only.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Final

from mstar.communication.ownership import try_own

FRONT_RANK: Final = -1
SUPERVISOR: Final = "supervisor"
"""Its name on the bus, beside those of `peer_name`."""
MAX_SOCKET_PATH_BYTES: Final = 107
"""Of an AF_UNIX path on Linux (unix(7)), without the terminating zero."""
SYSTEM_TEMP_DIR: Final = Path("/tmp")
"""Where the short directory goes. Not the environment's temporary directory, which may be the long path itself."""

_LOCK_NAME: Final = "owner.lock"
_LONGEST_SOCKET_NAME: Final = len("w65535.4294967295")


class AddressError(OSError):
    """No directory for sockets could be made; the message says where and what to change."""


def peer_name(rank: int) -> str:
    """Name of a process on the bus: "front", "w0", "w1", ..."""
    return "front" if rank == FRONT_RANK else f"w{rank}"


def socket_address(directory: Path, peer: str, incarnation: int) -> str:
    """ZMQ address of a process. A restarted process listens elsewhere than the one it replaces."""
    return f"ipc://{directory / f'{peer}.{incarnation}'}"


def owned_prefix() -> str:
    """Beginning of the names of everything that instances of this user put into shared places."""
    return f"mstar-{os.getuid()}-"


class InstanceDir:
    """The 0700 directory of one running instance, removed by `close`. A lock, not a process id, says whether its owner
    lives: the kernel lets it go however the owner dies."""

    def __init__(self, instance: str, path: Path, lock_fd: int) -> None:
        self.instance = instance
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, base: Path) -> InstanceDir:
        """A new instance below `base` (made if missing), or below the system's temporary directory when a socket's path
        below `base` would be too long.

        Raises:
            AddressError: the directory cannot be made.
        """
        for _ in range(8):
            instance = secrets.token_hex(4)
            path = _place(base, instance)
            if not _make_private(path):
                continue
            lock_fd = try_own(path / _LOCK_NAME, create=True)
            if lock_fd is not None:
                os.write(lock_fd, f"pid {os.getpid()}\n".encode())
                return cls(instance, path, lock_fd)
            # Another starting server took the new directory for a leftover; the next name is free again.
            shutil.rmtree(path, ignore_errors=True)
        raise AddressError(f"no sockets below {base}: every new directory was taken; is something else creating them?")

    def address(self, peer: str, incarnation: int) -> str:
        return socket_address(self.path, peer, incarnation)

    def close(self) -> None:
        """Removes the directory and lets the lock go."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def reclaim_stale_dirs(base: Path) -> list[Path]:
    """Removes the directories of this user's dead instances, below `base` and the system's temporary directory. Returns
    what was removed. Directories without a lock of ours are left alone."""
    removed = []
    name = re.compile(re.escape(owned_prefix()) + r"[0-9a-f]{8,16}")
    for root in dict.fromkeys((base, SYSTEM_TEMP_DIR)):
        try:
            entries = sorted(root.iterdir())
        except OSError:
            continue
        for path in entries:
            if not name.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
                continue
            lock_fd = try_own(path / _LOCK_NAME)
            if lock_fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock_fd)
                removed.append(path)
    return removed


def _make_private(path: Path) -> bool:
    """A new 0700 directory; False: the name is taken."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.parent.is_dir():
            return False
        raise AddressError(
            f"no sockets below {path.parent}: {error.strerror}; set MSTAR_SOCKET_DIR to a directory that this user may "
            "write to"
        ) from error
    return True


def _place(base: Path, instance: str) -> Path:
    path = base / f"{owned_prefix()}{instance}"
    if len(os.fsencode(path)) + 1 + _LONGEST_SOCKET_NAME <= MAX_SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return SYSTEM_TEMP_DIR / f"{owned_prefix()}{digest}"
