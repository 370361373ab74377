"""Compiles the C++ sources of this folder into one shared library per machine and keeps it in the cache directory.

Runs where the kernels are selected, at start-up; processes may race to it. Takes a few seconds once, because the
sources include no torch header and use no OpenMP: the kernels have a pool of threads of their own (`pool.cpp`). Must
not run on the path of a request.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from mstar.platforms import host

logger = logging.getLogger(__name__)

_SOURCES = ("linear.cpp", "rows.cpp", "attention.cpp", "pool.cpp", "replay.cpp")
_HEADERS = ("vector.h", "panel.h", "pool.h", "tile.h")
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-w")
_TIMEOUT_S = 120.0


class BuildError(RuntimeError):
    """The kernels could not be compiled here. The message says what is missing or what the compiler said."""


def load_or_build(cache_dir: Path) -> Path:
    """Path of the library for these sources, this compiler and this processor.

    Raises:
        BuildError: no compiler, the compiler failed, or the cache cannot be written.
    """
    compiler = _find_compiler()
    folder = Path(__file__).parent
    target = cache_dir / "kernels" / f"mstar-cpu-{_fingerprint(folder, compiler)}.so"
    if target.exists():
        return target
    started = time.monotonic()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as work:
            library = _compile(compiler, folder, Path(work))
            library.replace(target)  # a process that lost the race replaces equal bytes
    except OSError as error:
        raise BuildError(f"cannot write the kernel cache {target.parent}: {error}") from error
    logger.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - started, target)
    return target


def _find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler on the path (looked for {', '.join(_COMPILERS)})")


def _target_flags() -> tuple[str, ...]:
    return ("-mcpu=native",) if host.architecture() in ("aarch64", "arm64") else ("-march=native",)


def _fingerprint(folder: Path, compiler: str) -> str:
    version = _run([compiler, "--version"])
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((folder / name).read_bytes())
    machine = (platform.machine(), *sorted(host.processor_flags()))
    for part in (compiler, version, *_FLAGS, *_target_flags(), *machine):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compile(compiler: str, folder: Path, work: Path) -> Path:
    objects: list[str] = []
    for name in _SOURCES:
        objects.append(str(work / f"{name}.o"))
        _run([compiler, *_FLAGS, *_target_flags(), "-c", str(folder / name), "-o", objects[-1]])
    library = work / "kernels.so"
    _run([compiler, "-shared", "-pthread", *objects, "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[:2000]}")
    return done.stdout
