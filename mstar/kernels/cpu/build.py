"""Compiles the C++ sources of this folder into one shared library per machine and keeps it in the cache directory.

Runs where the kernels are selected, at start-up; processes may race to it. Takes a few seconds once, because the
sources include no torch header. Must not run on the path of a request.

The library has to share the OpenMP runtime that torch has loaded: a second one would bring a second pool of threads
that spin against the first. So the code is compiled with ``-fopenmp`` and linked to that very file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from mstar.platforms import host

logger = logging.getLogger(__name__)

_SOURCES = ("linear.cpp", "rows.cpp", "attention.cpp")
_HEADERS = ("vector.h", "panel.h", "tile.h")
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden", "-w")
_OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")  # the latter two answer libgomp's calls as well
_TIMEOUT_S = 120.0


class BuildError(RuntimeError):
    """The kernels could not be compiled here. The message says what is missing or what the compiler said."""


def load_or_build(cache_dir: Path) -> Path:
    """Path of the library for these sources, this compiler, this processor and this OpenMP runtime.

    Raises:
        BuildError: no compiler, no shared OpenMP runtime, the compiler failed, or the cache cannot be written.
    """
    compiler = _find_compiler()
    openmp = loaded_openmp_runtimes()
    if len(openmp) != 1:
        raise BuildError(f"torch should have one OpenMP runtime loaded, found {[str(path) for path in openmp]}")
    folder = Path(__file__).parent
    target = cache_dir / "kernels" / f"mstar-cpu-{_fingerprint(folder, compiler, openmp[0])}.so"
    if target.exists():
        return target
    started = time.monotonic()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as work:
            library = _compile(compiler, folder, Path(work), openmp[0])
            os.replace(library, target)  # a process that lost the race replaces equal bytes
    except OSError as error:
        raise BuildError(f"cannot write the kernel cache {target.parent}: {error}") from error
    logger.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - started, target)
    return target


def loaded_openmp_runtimes() -> list[Path]:
    """OpenMP runtimes mapped into this process, each file once."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(fields[5]) for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6}
    return sorted(path for path in paths if path.name.startswith(_OPENMP_NAMES))


def _find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler on the path (looked for {', '.join(_COMPILERS)})")


def _target_flags() -> tuple[str, ...]:
    return ("-mcpu=native",) if host.architecture() in ("aarch64", "arm64") else ("-march=native",)


def _fingerprint(folder: Path, compiler: str, openmp: Path) -> str:
    version = _run([compiler, "--version"])
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((folder / name).read_bytes())
    machine = (platform.machine(), *sorted(host.processor_flags()))
    for part in (compiler, version, *_FLAGS, *_target_flags(), *machine, str(openmp), torch.__version__):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compile(compiler: str, folder: Path, work: Path, openmp: Path) -> Path:
    objects: list[str] = []
    for name in _SOURCES:
        objects.append(str(work / f"{name}.o"))
        _run([compiler, *_FLAGS, *_target_flags(), "-c", str(folder / name), "-o", objects[-1]])
    library = work / "kernels.so"
    _run([compiler, "-shared", *objects, str(openmp), "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[:2000]}")
    return done.stdout
