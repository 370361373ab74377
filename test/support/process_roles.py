"""Which child process of a running server is which. No torch."""

from __future__ import annotations

import contextlib
import re

import psutil

_WORKER_SOCKET = re.compile(r"/w(\d+)\.\d+$")


def worker_rank(pid: int) -> int | None:
    """Of a worker, by the socket that it listens on; None: it is none, has not come that far, or has ended. Workers
    have children too, the processes that try grammars."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for connection in psutil.Process(pid).net_connections(kind="unix"):
            if isinstance(connection.laddr, str) and (match := _WORKER_SOCKET.search(connection.laddr)):
                return int(match[1])
    return None


def is_front(pid: int) -> bool:
    """Of a child of the supervisor: it has preprocess processes, and is no worker."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).children()) and worker_rank(pid) is None
    return False
