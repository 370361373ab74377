"""A descriptor that another thread or a signal handler makes readable: what a blocked loop waits on beside sockets."""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """Set from any thread, cleared by the loop that waits. Setting twice before a clear is setting once."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._read_fd = self._write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)

    def fileno(self) -> int:
        """Readable between `set` and `clear`. Pass it to `Bus.wait`."""
        return self._read_fd

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is readable already
            os.write(self._write_fd, (1).to_bytes(8, "little"))

    def clear(self) -> bool:
        """Whether it was set."""
        try:
            return bool(os.read(self._read_fd, 65536 if self._read_fd != self._write_fd else 8))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """A second call does nothing."""
        for fd in {self._read_fd, self._write_fd} - {-1}:
            os.close(fd)
        self._read_fd = self._write_fd = -1
