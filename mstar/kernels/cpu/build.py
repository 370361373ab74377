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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mstar.platforms import host

logger = logging.getLogger(__name__)

_SOURCES = (
    "linear.cpp",
    "rows.cpp",
    "rope.cpp",
    "attention.cpp",
    "gated_delta.cpp",
    "experts.cpp",
    "pool.cpp",
    "replay.cpp",
)
_HEADERS = ("vector.h", "gates.h", "panel.h", "matrix.h", "pool.h", "softmax.h", "tile.h")
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-w")
_TIMEOUT_S = 120.0


class BuildError(RuntimeError):
    """The kernels could not be compiled here. The message says what is missing or what the compiler said."""


def load_or_build(cache_dir: Path, target: tuple[str, ...] | None = None) -> Path:
    """Path of the library for these sources, this compiler and this processor.

    ``target`` replaces the compiler options that use everything this processor has.

    Raises:
        BuildError: no compiler, the compiler failed, or the cache cannot be written.
    """
    compiler = _find_compiler()
    flags = (*_FLAGS, *(_native_target() if target is None else target))
    folder = Path(__file__).parent
    library = cache_dir / "kernels" / f"mstar-cpu-{_fingerprint(folder, compiler, flags)}.so"
    if library.exists():
        return library
    started = time.monotonic()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as work:
            built = _compile(compiler, flags, folder, Path(work))
            built.replace(library)  # a process that lost the race replaces equal bytes
    except OSError as error:
        raise BuildError(f"cannot write the kernel cache {library.parent}: {error}") from error
    logger.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - started, library)
    return library


def _find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler on the path (looked for {', '.join(_COMPILERS)})")


def _native_target() -> tuple[str, ...]:
    return ("-mcpu=native",) if host.architecture() in ("aarch64", "arm64") else ("-march=native",)


def _fingerprint(folder: Path, compiler: str, flags: tuple[str, ...]) -> str:
    version = _run([compiler, "--version"])
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((folder / name).read_bytes())
    machine = (platform.machine(), *sorted(host.processor_flags()))
    for part in (compiler, version, *flags, *machine):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compile(compiler: str, flags: tuple[str, ...], folder: Path, work: Path) -> Path:
    objects = [str(work / f"{name}.o") for name in _SOURCES]
    commands = [
        [compiler, *flags, "-c", str(folder / name), "-o", made] for name, made in zip(_SOURCES, objects, strict=True)
    ]
    with ThreadPoolExecutor(max_workers=min(len(commands), host.num_cores())) as compilers:
        list(compilers.map(_run, commands))
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
