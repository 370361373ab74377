"""The shared-memory arena: no overlap, conservation, growth, and what a killed process leaves."""

import errno
import fcntl
import os
import secrets
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.communication.arena import ALIGNMENT, SHM_DIR, Arena, ArenaError, ArenaReader, reclaim, reclaim_stale
from mstar.communication.extents import Extents

KIB = 1024
OWNER = """
import sys
from pathlib import Path
from mstar.communication.arena import Arena
arena = Arena(sys.argv[1], 3, 7, limit_bytes=4 << 20, first_bytes=1 << 20, directory=Path(sys.argv[2]))
room = arena.reserve(2 << 20, 0)
room.data[:] = 9
print(room.segment, room.offset, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def instance() -> str:
    return secrets.token_hex(4)


def files_of(instance: str, directory: Path = SHM_DIR) -> list[str]:
    return sorted(path.name for path in directory.glob(f"mstar-{os.getuid()}-{instance}-*"))


def small(instance: str, directory: Path, limit: int = 16 * KIB, first: int = 4 * KIB) -> Arena:
    return Arena(instance, 0, 1, limit_bytes=limit, first_bytes=first, directory=directory)


def test_a_peer_reads_what_was_written(instance: str) -> None:
    arena, reader = Arena(instance, 0, 1), ArenaReader(instance)
    room = arena.reserve(100, peer=1)
    assert room is not None
    assert (room.offset % ALIGNMENT, room.data.size) == (0, 100)
    room.data[:] = np.arange(100)
    seen = reader.data(room.segment, room.offset, 100)
    assert seen.tolist() == list(range(100))
    assert not seen.flags.writeable
    assert (arena.num_used_bytes, arena.num_tickets) == (128, 1)
    assert files_of(instance) == [room.segment]
    assert (SHM_DIR / room.segment).stat().st_mode & 0o777 == 0o600
    del seen, room
    reader.close()
    arena.close()
    assert files_of(instance) == []


def test_only_the_peer_frees_its_ticket_and_only_once(instance: str, tmp_path: Path) -> None:
    arena = small(instance, tmp_path)
    first, second = arena.reserve(64, 1), arena.reserve(64, 2)
    assert first is not None and second is not None
    assert arena.free(2, [first.ticket]) == 0
    assert arena.free(1, [first.ticket, first.ticket, 12345]) == 1
    assert arena.num_used_bytes == 64
    assert arena.drop_peer(1) == 0
    assert arena.drop_peer(2) == 1
    assert (arena.num_used_bytes, arena.num_tickets) == (0, 0)
    arena.close()


def test_an_acknowledgement_frees_what_the_same_peer_never_got_before(instance: str, tmp_path: Path) -> None:
    arena = small(instance, tmp_path)
    made = [arena.reserve(64, peer) for peer in (1, 2, 1, 1, 2)]
    tickets = [one.ticket for one in made if one is not None]
    assert arena.free_older(1, tickets[0]) == 0
    assert arena.free(1, [tickets[2]]) == 1
    assert arena.free_older(1, tickets[2]) == 1, "the first; the fourth may still be on its way"
    assert arena.num_tickets == 3
    assert (arena.drop_peer(1), arena.drop_peer(2)) == (1, 2)
    arena.close()


def test_tickets_of_another_incarnation_mean_nothing(instance: str, tmp_path: Path) -> None:
    old = Arena(instance, 0, 1, directory=tmp_path)
    new = Arena(instance, 0, 2, directory=tmp_path)
    stale, fresh = old.reserve(64, 1), new.reserve(64, 1)
    assert stale is not None and fresh is not None
    assert stale.ticket != fresh.ticket
    assert new.free(1, [stale.ticket]) == 0
    old.close()
    new.close()


def test_it_grows_to_its_limit_then_says_full_then_trims(instance: str, tmp_path: Path) -> None:
    arena = small(instance, tmp_path)
    rooms = [arena.reserve(4 * KIB, 1) for _ in range(4)]
    assert all(room is not None for room in rooms)
    assert arena.num_bytes == 16 * KIB
    assert arena.reserve(1, 1) is None
    segments = {room.segment for room in rooms if room is not None}
    assert files_of(instance, tmp_path) == sorted(segments)
    assert arena.trim() == 0, "nothing is empty"
    arena.free(1, [room.ticket for room in rooms if room is not None])
    assert arena.trim() == 12 * KIB
    assert (arena.num_bytes, arena.num_used_bytes) == (4 * KIB, 0)
    assert len(files_of(instance, tmp_path)) == 1
    arena.close()


def test_the_largest_reservation_fits_once_everything_else_is_free(instance: str, tmp_path: Path) -> None:
    mib = 1 << 20
    arena = small(instance, tmp_path, limit=8 * mib, first=mib)
    rooms = [arena.reserve(mib, 1) for _ in range(5)]
    assert len(files_of(instance, tmp_path)) == 4, "of 1, 1, 2 and 4 MiB"
    assert arena.largest_reservation_bytes == 7 * mib
    assert arena.reserve(7 * mib, 2) is None
    arena.free(1, [room.ticket for room in rooms if room is not None])
    assert arena.reserve(7 * mib, 2) is not None
    assert len(files_of(instance, tmp_path)) == 2
    with pytest.raises(ArenaError, match="more than the 7340032"):
        arena.reserve(7 * mib + 1, 2)
    arena.close()


def test_full_shared_memory_waits_for_acknowledgements_or_fails(
    instance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = small(instance, tmp_path, limit=1 << 20)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match="no room"):
        arena.reserve(8 * KIB, 1)
    room = arena.reserve(4 * KIB, 1)
    assert room is not None
    assert arena.reserve(8 * KIB, 1) is None
    assert len(files_of(instance, tmp_path)) == 1
    with pytest.raises(OSError, match="No space"):
        Arena(instance, 1, 1, directory=tmp_path)
    assert len(files_of(instance, tmp_path)) == 1
    arena.close()


def test_memory_is_allocated_when_it_is_promised(instance: str, tmp_path: Path) -> None:
    """A file without blocks would end the process with SIGBUS when the file system fills up."""
    arena = Arena(instance, 0, 1, first_bytes=1 << 20)
    (name,) = files_of(instance)
    assert (SHM_DIR / name).stat().st_blocks * 512 >= 1 << 20
    arena.close()


def test_a_reader_refuses_what_it_should_not_read(instance: str, tmp_path: Path) -> None:
    arena, reader = small(instance, tmp_path), ArenaReader(instance, directory=tmp_path)
    room = arena.reserve(64, 1)
    assert room is not None
    (tmp_path / "secret").write_bytes(b"x" * 64)
    for name in (
        "secret",
        "../secret",
        f"mstar-{os.getuid()}-{instance}-/../secret",
        f"mstar-{os.getuid()}-other-w0-1-1",
    ):
        with pytest.raises(ArenaError, match="no arena of this instance"):
            reader.data(name, 0, 8)
    with pytest.raises(ArenaError, match="owner is gone"):
        reader.data(f"mstar-{os.getuid()}-{instance}-w9-1-1", 0, 8)
    for offset, size in ((-1, 2), (0, -1), (4 * KIB, 1), (0, 4 * KIB + 1)):
        with pytest.raises(ArenaError, match="which has 4096"):
            reader.data(room.segment, offset, size)
    empty = tmp_path / f"mstar-{os.getuid()}-{instance}-w1-1-1"
    empty.touch()
    with pytest.raises(ArenaError, match="mapped"):
        reader.data(empty.name, 0, 0)
    reader.close()
    arena.close()


def test_a_reader_lets_go_of_removed_files_and_lost_peers(instance: str, tmp_path: Path) -> None:
    arena, reader = small(instance, tmp_path), ArenaReader(instance, directory=tmp_path)
    other = Arena(instance, 10, 1, directory=tmp_path)
    rooms = [arena.reserve(4 * KIB, 1), arena.reserve(4 * KIB, 1), other.reserve(64, 1)]
    for room in rooms:
        assert room is not None
        reader.data(room.segment, room.offset, 64)
    assert reader.num_mapped == 3
    arena.free(1, [room.ticket for room in rooms if room is not None])
    reader.trim()
    assert reader.num_mapped == 3
    arena.trim()
    reader.trim()
    assert reader.num_mapped == 2
    reader.drop_peer(1)
    assert reader.num_mapped == 2, "w1 is not w10"
    reader.drop_peer(0)
    assert reader.num_mapped == 1
    reader.close()
    assert reader.num_mapped == 0
    arena.close()
    other.close()


def test_a_view_that_is_still_held_does_not_break_closing(instance: str, tmp_path: Path) -> None:
    arena, reader = small(instance, tmp_path), ArenaReader(instance, directory=tmp_path)
    room = arena.reserve(64, 1)
    assert room is not None
    room.data[:] = 5
    view = reader.data(room.segment, room.offset, 64)
    arena.close()
    reader.close()
    assert view.tolist() == [5] * 64


def test_what_a_killed_owner_leaves_is_reclaimed(instance: str, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, instance, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    segment, offset = owner.stdout.readline().split()
    reader = ArenaReader(instance, directory=tmp_path)
    assert (reader.data(segment, int(offset), 2 << 20) == 9).all()
    reclaim_stale(directory=tmp_path)
    assert len(files_of(instance, tmp_path)) == 2, "the owner lives"
    owner.kill()
    owner.communicate()
    assert len(files_of(instance, tmp_path)) == 2
    successor = Arena(instance, 3, 71, directory=tmp_path)
    assert reclaim(instance, 3, 6, directory=tmp_path) == 0
    assert reclaim(instance, 30, 7, directory=tmp_path) == 0
    assert reclaim(instance, 3, 7, directory=tmp_path) == 2
    assert len(files_of(instance, tmp_path)) == 1
    successor.close()
    assert (reader.data(segment, int(offset), 2 << 20) == 9).all(), "a map outlives the name"
    reader.close()


def test_leftovers_of_dead_instances_are_found_by_their_locks(instance: str, tmp_path: Path) -> None:
    alive = small(instance, tmp_path)
    dead = [tmp_path / f"mstar-{os.getuid()}-{name}-w0-1-1" for name in ("deadbeef", "local7f00")]
    for path in dead:
        path.write_bytes(b"x")
    unrelated = tmp_path / f"mstar-{os.getuid()}-notes"
    unrelated.write_bytes(b"x")
    assert reclaim_stale(directory=tmp_path) == 2
    assert not any(path.exists() for path in dead)
    assert unrelated.exists()
    assert len(files_of(instance, tmp_path)) == 1
    alive.close()


def test_a_file_taken_for_a_leftover_before_it_was_locked_is_made_again(
    instance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers that start at the same moment."""
    lock, num_taken = fcntl.flock, 0

    def late_lock(fd: int, how: int) -> None:
        nonlocal num_taken
        if how == fcntl.LOCK_EX and num_taken < 2:
            num_taken += 1
            assert reclaim_stale(directory=tmp_path) == 1
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late_lock)
    arena, reader = small(instance, tmp_path), ArenaReader(instance, directory=tmp_path)
    room = arena.reserve(64, 1)
    assert room is not None
    assert files_of(instance, tmp_path) == [room.segment]
    assert reader.data(room.segment, 0, 64).size == 64
    assert reclaim_stale(directory=tmp_path) == 0
    reader.close()
    arena.close()


class ExtentsMachine(RuleBasedStateMachine):
    """Taken and free extents tile the range, without overlap and without two free neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(32)
        self.taken: dict[int, int] = {}

    @rule(size=st.integers(1, 12))
    def take(self, size: int) -> None:
        free = self.extents.free_extents()
        start = self.extents.take(size)
        if start is None:
            assert all(length < size for _, length in free)
        else:
            assert start == next(at for at, length in free if length >= size), "first fit"
            self.taken[start] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        self.extents.give_back(start)
        del self.taken[start]
        with pytest.raises(KeyError):
            self.extents.give_back(start)

    @invariant()
    def tiles(self) -> None:
        free = self.extents.free_extents()
        tiles = sorted([*free, *self.taken.items()])
        assert [start for start, _ in tiles] == [0, *np.cumsum([size for _, size in tiles])][: len(tiles)]
        assert sum(size for _, size in tiles) == 32
        assert self.extents.num_free == sum(size for _, size in free)
        assert self.extents.is_empty == (not self.taken)
        assert all(a + size < b for (a, size), (b, _) in pairwise(free))


class ArenaMachine(RuleBasedStateMachine):
    """Every reservation keeps its bytes until it is freed, as a reader in another process would see them."""

    def __init__(self) -> None:
        super().__init__()
        instance = secrets.token_hex(4)
        self.directory = Path(f"/tmp/ma-{instance}")
        self.directory.mkdir()
        self.arena = Arena(instance, 0, 1, limit_bytes=8 * KIB, first_bytes=2 * KIB, directory=self.directory)
        self.reader = ArenaReader(instance, directory=self.directory)
        self.live: dict[int, tuple[int, str, int, bytes]] = {}

    def teardown(self) -> None:
        self.reader.close()
        self.arena.close()
        assert list(self.directory.iterdir()) == []
        self.directory.rmdir()

    @rule(size=st.integers(1, 7 * KIB), peer=st.integers(0, 2))
    def reserve(self, size: int, peer: int) -> None:
        if size > self.arena.largest_reservation_bytes:
            with pytest.raises(ArenaError):
                self.arena.reserve(size, peer)
            return
        room = self.arena.reserve(size, peer)
        if room is None:
            assert self.live, "an empty arena takes whatever fits at all"
            return
        assert room.ticket not in self.live
        pattern = np.random.default_rng(room.ticket).integers(0, 256, size, np.uint8)
        room.data[:] = pattern
        self.live[room.ticket] = (peer, room.segment, room.offset, pattern.tobytes())

    @precondition(lambda self: self.live)
    @rule(data=st.data(), peer=st.integers(0, 2))
    def free(self, data: st.DataObject, peer: int) -> None:
        tickets = data.draw(st.lists(st.sampled_from(sorted(self.live)), max_size=4))
        gone = {ticket for ticket in tickets if self.live[ticket][0] == peer}
        assert self.arena.free(peer, tickets) == len(gone)
        for ticket in gone:
            del self.live[ticket]

    @rule(peer=st.integers(0, 2))
    def drop_peer(self, peer: int) -> None:
        gone = [ticket for ticket, entry in self.live.items() if entry[0] == peer]
        assert self.arena.drop_peer(peer) == len(gone)
        for ticket in gone:
            del self.live[ticket]

    @rule()
    def trim(self) -> None:
        self.arena.trim()
        self.reader.trim()
        used = {segment for _, segment, _, _ in self.live.values()}
        assert len(list(self.directory.iterdir())) <= 1 + len(used)

    @invariant()
    def agrees(self) -> None:
        assert self.arena.num_tickets == len(self.live)
        assert self.arena.num_used_bytes == sum(-(-len(p) // ALIGNMENT) * ALIGNMENT for *_, p in self.live.values())
        assert self.arena.num_bytes <= 8 * KIB
        assert self.arena.num_bytes == sum(path.stat().st_size for path in self.directory.iterdir())
        for _, segment, offset, pattern in self.live.values():
            assert self.reader.data(segment, offset, len(pattern)).tobytes() == pattern


TestExtentsMachine = ExtentsMachine.TestCase
TestArenaMachine = ArenaMachine.TestCase
