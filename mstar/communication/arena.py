"""Shared memory that carries tensors from one process to its peers on the same host.

Every sender owns one `Arena`: files in /dev/shm that it maps for writing and its peers, through an `ArenaReader`, for
reading. A reservation belongs to one peer and is freed by its ticket once that peer has copied it out, or with all
others of that peer when the peer is lost. Both belong to the loop thread of their process; no torch.

A file is locked by its owner as long as that lives. So what a killed process left behind can be told from what is in
use, and is removed by the supervisor (`reclaim`) or at the next start (`reclaim_stale`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from mstar.communication.address import owned_prefix, peer_name
from mstar.communication.extents import Extents
from mstar.communication.ownership import try_own

ALIGNMENT: Final = 64
"""Bytes; every reservation, and every run of tensors in it, begins at a multiple."""
SHM_DIR: Final = Path("/dev/shm")
_GROWTH: Final = 1 << 20
_LARGEST_GROWTH: Final = 64 << 20


class ArenaError(Exception):
    """A reservation that no amount of waiting makes fit, or a file of a peer that cannot be read."""


class Reservation(NamedTuple):
    """Bytes `[offset, offset + len(data))` of the file `segment`; `data` is uint8 and writable."""

    ticket: int
    segment: str
    offset: int
    data: np.ndarray


class _Held(NamedTuple):
    peer: int
    segment: _Segment
    offset: int


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """See the module docstring. Starts with one segment, grows by further ones, and returns those with `trim`."""

    def __init__(
        self,
        instance: str,
        rank: int,
        incarnation: int,
        *,
        limit_bytes: int = 256 << 20,
        first_bytes: int = 4 << 20,
        directory: Path = SHM_DIR,
    ) -> None:
        """
        Raises:
            OSError: the first segment cannot be made (ENOSPC: the shared memory of this machine or container is full).
        """
        self._prefix = _prefix(instance, rank, incarnation)
        self._directory = directory
        self._limit_bytes = aligned(limit_bytes)
        self._first_bytes = min(aligned(first_bytes), self._limit_bytes)
        self._num_made = 0
        # A ticket of an earlier incarnation must mean nothing to this one.
        self._next_ticket = (incarnation << 32) + 1
        self._held: dict[int, _Held] = {}
        self._segments = [self._make_segment(self._first_bytes)]

    @property
    def num_bytes(self) -> int:
        """Size of all segments."""
        return sum(segment.extents.size for segment in self._segments)

    @property
    def num_used_bytes(self) -> int:
        return sum(segment.extents.size - segment.extents.num_free for segment in self._segments)

    @property
    def num_tickets(self) -> int:
        """Reservations that are not free."""
        return len(self._held)

    @property
    def largest_reservation_bytes(self) -> int:
        """What fits when everything else has been freed."""
        return max(self._first_bytes, self._limit_bytes - self._first_bytes)

    def reserve(self, num_bytes: int, peer: int) -> Reservation | None:
        """Room for `num_bytes` (at least 1) that the process of rank `peer` will read; None: full until something is
        freed.

        Raises:
            ArenaError: more than fits at all, or nothing is left to be freed and the machine's shared memory is full.
        """
        size = aligned(num_bytes)
        if size > self.largest_reservation_bytes:
            raise ArenaError(
                f"{num_bytes} bytes for {peer_name(peer)} are more than the {self.largest_reservation_bytes} that this "
                "arena can hold at once"
            )
        for segment in self._segments:
            offset = segment.extents.take(size)
            if offset is not None:
                break
        else:
            segment = self._grow(size)
            if segment is None:
                if not self._held:
                    raise ArenaError(f"{num_bytes} bytes for {peer_name(peer)}: {self._directory} has no room for them")
                return None
            offset = segment.extents.take(size)
            assert offset is not None, "a new segment holds what it was made for"
        ticket = self._next_ticket
        self._next_ticket += 1
        self._held[ticket] = _Held(peer, segment, offset)
        return Reservation(ticket, segment.name, offset, segment.data[offset : offset + num_bytes])

    def free(self, peer: int, tickets: Iterable[int]) -> int:
        """Frees what `peer` acknowledged; returns how many that were. A ticket that is not the peer's is skipped: it
        travelled while the peer was lost, or was meant for an earlier incarnation of this process."""
        num_freed = 0
        for ticket in tickets:
            held = self._held.get(ticket)
            if held is not None and held.peer == peer:
                del self._held[ticket]
                held.segment.extents.give_back(held.offset)
                num_freed += 1
        return num_freed

    def free_older(self, peer: int, ticket: int) -> int:
        """Frees what `peer` was to read before `ticket`, which it has acknowledged; returns how many reservations that
        were. Frames to one peer arrive in the order of their tickets, so a frame that is not acknowledged by then never
        came."""
        older: list[int] = []
        for made, held in self._held.items():  # in the order of their tickets
            if made >= ticket:
                break
            if held.peer == peer:
                older.append(made)
        return self.free(peer, older)

    def drop_peer(self, peer: int) -> int:
        """Frees everything that a lost peer was to read; returns how many reservations that were."""
        return self.free(peer, [ticket for ticket, held in self._held.items() if held.peer == peer])

    def trim(self) -> int:
        """Gives empty segments except the first back to the system; returns how many bytes that were."""
        unused = [segment for segment in self._segments[1:] if segment.extents.is_empty]
        for segment in unused:
            self._segments.remove(segment)
            segment.close()
        return sum(segment.extents.size for segment in unused)

    def close(self) -> None:
        """Removes the files. A peer that has mapped one can still read it."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._held.clear()

    def _grow(self, size: int) -> _Segment | None:
        segment = self._try_grow(size)
        if segment is None and self.trim():
            segment = self._try_grow(size)
        return segment

    def _try_grow(self, size: int) -> _Segment | None:
        room = min(self._limit_bytes - self.num_bytes, _free_bytes(self._directory))
        if size > room:
            return None
        wanted = max(-(-size // _GROWTH) * _GROWTH, min(self.num_bytes, _LARGEST_GROWTH))
        try:
            segment = self._make_segment(min(wanted, room))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            return None  # somebody else was faster; wait, as if this arena were full
        self._segments.append(segment)
        return segment

    def _make_segment(self, size: int) -> _Segment:
        while True:
            self._num_made += 1
            with contextlib.suppress(_TakenForStale):
                return _Segment(self._directory / f"{self._prefix}{self._num_made}", size)


class _TakenForStale(Exception):
    """Another starting server removed the file before it was locked; the next name is as good."""


class _Segment:
    """One file of an arena in its owner: mapped for writing, locked, all of its memory allocated."""

    def __init__(self, path: Path, size: int) -> None:
        self.name = path.name
        self.extents = Extents(size)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if not os.fstat(self._fd).st_nlink:
                raise _TakenForStale
            # Without this a full file system would end the process with SIGBUS at the first write.
            os.posix_fallocate(self._fd, 0, size)
            self._map = mmap.mmap(self._fd, size)
        except (OSError, _TakenForStale):
            path.unlink(missing_ok=True)
            os.close(self._fd)
            raise
        self.data = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        del self.data
        _unmap(self._map)


class ArenaReader:
    """Read-only maps of the arenas of this instance's other processes, kept until their files are gone."""

    def __init__(self, instance: str, *, directory: Path = SHM_DIR) -> None:
        self._prefix = f"{owned_prefix()}{instance}-"
        self._directory = directory
        self._maps: dict[str, tuple[int, mmap.mmap, np.ndarray]] = {}
        """Name of a file → its descriptor, its map, and the map as uint8."""

    @property
    def num_mapped(self) -> int:
        return len(self._maps)

    def data(self, segment: str, offset: int, num_bytes: int) -> np.ndarray:
        """Read-only uint8 `[num_bytes]`. Copy it at once, keep no view: the owner writes there again after the ticket.

        Raises:
            ArenaError: no such file (its owner is gone), not one of this instance, or a range outside it.
        """
        mapped = self._maps.get(segment)
        if mapped is None:
            mapped = self._open(segment)
        whole = mapped[2]
        if offset < 0 or num_bytes < 0 or offset + num_bytes > whole.size:
            raise ArenaError(f"bytes {offset} to {offset + num_bytes} of {segment}, which has {whole.size}")
        return whole[offset : offset + num_bytes]

    def drop_peer(self, peer: int) -> None:
        """Lets go of every file of a lost process."""
        for name in [name for name in self._maps if name.startswith(f"{self._prefix}{peer_name(peer)}-")]:
            self._close(name)

    def trim(self) -> None:
        """Lets go of the files that their owners have removed."""
        for name in [name for name, (fd, _, _) in self._maps.items() if not os.fstat(fd).st_nlink]:
            self._close(name)

    def close(self) -> None:
        for name in list(self._maps):
            self._close(name)

    def _open(self, segment: str) -> tuple[int, mmap.mmap, np.ndarray]:
        if not segment.startswith(self._prefix) or "/" in segment:
            raise ArenaError(f"{segment!r} is no arena of this instance ({self._prefix}...)")
        self.trim()
        try:
            fd = os.open(self._directory / segment, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"{segment} cannot be read: {error.strerror}; its owner is gone") from error
        try:
            mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ArenaError(f"{segment} cannot be mapped: {error}") from error
        self._maps[segment] = entry = (fd, mapped, np.frombuffer(mapped, np.uint8))
        return entry

    def _close(self, name: str) -> None:
        fd, mapped, data = self._maps.pop(name)
        del data
        os.close(fd)
        _unmap(mapped)


def reclaim(instance: str, rank: int, incarnation: int, *, directory: Path = SHM_DIR) -> int:
    """Removes the files of one dead process; returns how many there were. For its supervisor, who knows it is dead."""
    paths = list(directory.glob(f"{_prefix(instance, rank, incarnation)}*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def reclaim_stale(*, directory: Path = SHM_DIR) -> int:
    """Removes the files of this user whose owners are dead, of any instance; returns how many there were."""
    name = re.compile(re.escape(owned_prefix()) + r"[0-9a-z]+-(w\d+|front)-\d+-\d+")
    num_removed = 0
    for path in sorted(directory.glob(f"{owned_prefix()}*")):
        fd = try_own(path) if name.fullmatch(path.name) else None
        if fd is not None:
            path.unlink(missing_ok=True)  # still locked, so that an owner about to lock it finds it gone
            os.close(fd)
            num_removed += 1
    return num_removed


def _prefix(instance: str, rank: int, incarnation: int) -> str:
    return f"{owned_prefix()}{instance}-{peer_name(rank)}-{incarnation}-"


def _free_bytes(directory: Path) -> int:
    """Whole alignments that are free in the file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize // ALIGNMENT * ALIGNMENT


def _unmap(mapped: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a view of it is still alive somewhere; the memory goes with the view
        mapped.close()
