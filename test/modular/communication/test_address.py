"""Socket directories: length, privacy, several servers, leftovers."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstar.communication import address, wire
from mstar.communication.address import AddressError, InstanceDir, peer_name, reclaim_stale_dirs, socket_address
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import Remove

HOLDER = """
import sys
from pathlib import Path
from mstar.communication.address import InstanceDir
made = InstanceDir.create(Path(sys.argv[1]))
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Short, whatever pytest calls its own directories."""
    made = Path(f"/tmp/mt-{os.getpid()}-{tmp_path.name[-4:]}")
    made.mkdir()
    yield made  # pyright: ignore[reportReturnType]
    shutil.rmtree(made)


@pytest.fixture
def holder(base: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Another process with an instance below `base`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def of_length(base: Path, length: int) -> Path:
    """A path of exactly `length` bytes below `base`, in parts that a file system allows."""
    missing = length - len(os.fsencode(base)) - 1
    assert missing > 0
    return base / ("d" * missing)


def exchange(instance: InstanceDir) -> None:
    """A message between the longest names there are."""
    here, there = instance.address("w65535", 2**32 - 1), instance.address("front", 0)
    assert len(os.fsencode(here.removeprefix("ipc://"))) <= address.MAX_SOCKET_PATH_BYTES
    receiver, sender = ZmqBus(here, wire.decode_to_worker), ZmqBus(there, wire.decode_to_front)
    sender.connect("w65535", here)
    sender.send("w65535", [Remove("r")])
    assert receiver.wait(5)
    assert receiver.receive() == [Remove("r")]
    assert stat.S_ISSOCK(Path(here.removeprefix("ipc://")).stat().st_mode)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("length", [60, 81, 82, 83, 100, 107, 108, 150, 250])
def test_directories_of_any_length_work(base: Path, length: int) -> None:
    directory = of_length(base, length)
    instance = InstanceDir.create(directory)
    assert stat.S_IMODE(instance.path.stat().st_mode) == 0o700
    assert instance.path.is_relative_to(directory if length < 70 else Path("/tmp"))
    exchange(instance)
    instance.close()
    assert not instance.path.exists()


def test_a_long_temporary_directory_is_no_refuge(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default directory may itself be the one that is too long."""
    monkeypatch.setenv("TMPDIR", str(of_length(base, 150)))
    instance = InstanceDir.create(of_length(base, 150))
    exchange(instance)
    instance.close()


def test_bytes_not_characters_are_counted(base: Path) -> None:
    instance = InstanceDir.create(base / ("ü" * 40))
    exchange(instance)
    instance.close()


def test_two_servers_coexist(base: Path) -> None:
    first, second = InstanceDir.create(base), InstanceDir.create(base)
    assert first.instance != second.instance
    assert not {first.path, second.path}.intersection(reclaim_stale_dirs(base))
    exchange(first)
    first.close()
    assert second.path not in reclaim_stale_dirs(base)
    exchange(second)
    second.close()


def test_names() -> None:
    assert [peer_name(-1), peer_name(0), peer_name(12)] == ["front", "w0", "w12"]
    assert socket_address(Path("/a"), "w1", 3) == "ipc:///a/w1.3"
    assert socket_address(Path("/a"), "w1", 4) != socket_address(Path("/a"), "w1", 3)


def test_leftovers_of_a_killed_instance_are_removed_and_no_others(
    base: Path, holder: tuple[subprocess.Popen, Path]
) -> None:
    process, path = holder
    (path / "w0.0").touch()
    unlocked = base / f"mstar-{os.getuid()}-0123abcd"
    unlocked.mkdir()
    foreign = base / f"mstar-{os.getuid()}-notes"
    foreign.mkdir()
    (foreign / "owner.lock").touch()
    assert path not in reclaim_stale_dirs(base), "its owner lives"
    assert path.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path in reclaim_stale_dirs(base)
    assert not path.exists()
    assert unlocked.exists()
    assert foreign.exists()


def test_hashed_directories_are_reclaimed_too(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "SYSTEM_TEMP_DIR", base / "t")  # nobody else cleans up there
    instance = InstanceDir.create(of_length(base, 150))
    path = instance.path
    assert path.parent == base / "t"
    assert reclaim_stale_dirs(of_length(base, 150)) == []
    os.close(instance._lock_fd)  # the lock goes as if its owner had died
    assert reclaim_stale_dirs(of_length(base, 150)) == [path]
    assert not path.exists()


def test_a_link_is_not_followed(base: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "owner.lock").touch()
    (base / f"mstar-{os.getuid()}-0123abcd").symlink_to(victim)
    assert all(path.parent != base for path in reclaim_stale_dirs(base))
    assert victim.exists()


def test_a_directory_that_cannot_be_made_is_named(base: Path) -> None:
    (base / "file").touch()
    with pytest.raises(AddressError, match=r"MSTAR_SOCKET_DIR"):
        InstanceDir.create(base / "file")
    assert all(path.parent == Path("/tmp") for path in reclaim_stale_dirs(base / "missing"))
