"""What the processes of a server hold by the kernel's account: descriptors by kind, shared-memory files, memory."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
from support.instance import shared_memory_of
from support.process_roles import is_front, worker_rank

_NUMBERS = re.compile(r"[0-9a-f]{8,}|\d+")


@dataclass(frozen=True)
class ProcessFacts:
    """By role (`supervisor`, `front`, `worker 0`, `preprocess 0`, ...). `descriptors`: number by kind; a TCP socket
    that is connected to a client counts as `connection`."""

    pids: dict[str, int]
    descriptors: dict[str, Counter[str]]
    rss_bytes: dict[str, int]


def look_at(supervisor: int) -> ProcessFacts:
    """Raises `psutil.NoSuchProcess` when one ends meanwhile."""
    pids = roles(supervisor)
    processes = {role: psutil.Process(pid) for role, pid in pids.items()}
    return ProcessFacts(
        pids,
        {role: _descriptors(process) for role, process in processes.items()},
        {role: process.memory_info().rss for role, process in processes.items()},
    )


def roles(supervisor: int) -> dict[str, int]:
    """The supervisor and its children, and the front's. A worker that is not known by its rank yet has its pid's."""
    found = {"supervisor": supervisor}
    for child in psutil.Process(supervisor).children():
        if is_front(child.pid):
            found["front"] = child.pid
            for index, process in enumerate(sorted(child.children(), key=lambda process: process.pid)):
                found[f"preprocess {index}"] = process.pid
        else:
            rank = worker_rank(child.pid)
            found[f"worker {child.pid if rank is None else rank}"] = child.pid
    return found


def _descriptors(process: psutil.Process) -> Counter[str]:
    connected = {
        connection.fd
        for connection in process.net_connections(kind="tcp")
        if connection.status not in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = _NUMBERS.sub("#", str(entry.readlink()))
            kinds["connection" if int(entry.name) in connected else target] += 1
    return kinds


def instance_of(sockets: Path) -> str:
    """The name of the only instance that has its sockets in this directory."""
    [private] = sockets.iterdir()
    return private.name.rpartition("-")[2]


def shared_memory_bytes(instance: str) -> dict[str, int]:
    return {name: (Path("/dev/shm") / name).stat().st_blocks * 512 for name in shared_memory_of(instance)}
