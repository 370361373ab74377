"""What `mstar check` says about this machine: for each thing that a server needs, what was found, whether it will do,
and what to change where it will not. Starts nothing, changes nothing, asks no network."""

from __future__ import annotations

import importlib.metadata
import os
import platform as python_platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

import mstar
from mstar import envs
from mstar.api_server.connection import KEPT_DESCRIPTORS
from mstar.config.schema import ServerConfig
from mstar.platforms import current_platform, host

Level = Literal["ok", "warn", "fail"]
GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_SHARED_BYTES = GIB // 4
LEAST_DISK_BYTES = 5 * GIB
LEAST_CONNECTIONS = 512
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")


class Finding(NamedTuple):
    """One line. `advice`: what to do, where it is not `ok`. `fail`: no server will run here, or not as it is asked to;
    `warn`: one will, with less."""

    level: Level
    name: str
    found: str
    advice: str = ""


def examine(server: ServerConfig | None = None) -> Iterator[Finding]:
    """Everything, for a server with these settings."""
    yield system()
    yield Finding("ok", "python", python_platform.python_version())
    yield Finding("ok", "mstar", mstar.__version__)
    yield libraries(importlib.metadata.requires("mstar") or ())
    yield from device()
    yield Finding("ok", "cores", str(current_platform.num_cores()))
    yield processor()
    yield memory(current_platform.free_memory_bytes("cpu"), host.total_memory_bytes())
    yield shared_memory(SHARED_MEMORY)
    yield descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield compiler()
    yield directory("sockets", envs.SOCKET_DIR.get(), "MSTAR_SOCKET_DIR", least_bytes=0)
    yield directory("cache", envs.CACHE_DIR.get(), "MSTAR_CACHE_DIR", least_bytes=LEAST_DISK_BYTES)
    yield directory("checkpoint cache", Path(HF_HUB_CACHE), "HF_HOME", least_bytes=LEAST_DISK_BYTES)
    yield port(server or ServerConfig())
    for name in envs.unknown_variables():
        yield Finding("fail", name, "is not a variable of this version", f"unset {name}, or correct its name")


def show(console: Console, findings: Iterable[Finding]) -> bool:
    """Prints them; True unless one is a `fail`."""
    good = True
    styles = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}
    for level, name, found, advice in findings:
        good = good and level != "fail"
        line = Text.assemble((f"{level:>4}", styles[level]), f"  {name:<16}  {found}")
        console.print(line, highlight=False, soft_wrap=True)
        if advice:
            console.print(Text(f"{'':>24}{advice}"), highlight=False, soft_wrap=True)
    return good


def system() -> Finding:
    name, release = python_platform.system(), python_platform.release()
    found = f"{name} {release}, {host.architecture()}"
    if not sys.platform.startswith("linux"):
        return Finding("fail", "system", found, "mstar serve needs Linux: use a container or a virtual machine")
    return Finding("ok", "system", found)


def libraries(requirements: Sequence[str], extra: str = "") -> Finding:
    """What mstar requires, or what an extra of it adds, against what is installed. Nothing is imported."""
    wrong: list[str] = []
    count = 0
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if bool(extra) != ("extra ==" in str(marker)) or (marker and not marker.evaluate({"extra": extra})):
            continue
        count += 1
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version} and not {requirement.specifier}")
    name = f"extra {extra}" if extra else "libraries"
    if not count:
        return Finding("warn", name, "mstar is not installed", "pip install -e . in the checkout, or pip install mstar")
    if wrong:
        target = f"'mstar[{extra}]'" if extra else "mstar"
        return Finding("warn" if extra else "fail", name, "; ".join(wrong), f"pip install --upgrade {target}")
    return Finding("ok", name, f"{count}, all as required")


def device() -> Iterator[Finding]:
    """torch, and the accelerator if there is one: it, its driver, and the libraries for it."""
    build = current_platform.torch_build()
    yield Finding("ok", "torch", f"{importlib.metadata.version('torch')}, built for {build}")
    if current_platform.device_type() == "cpu":
        if not current_platform.has_accelerator():
            yield Finding("ok", "device", f"cpu, {current_platform.arch()}")
            return
        found = f"cpu: torch cannot use the accelerator; driver {driver(NVIDIA_DRIVER)}"
        advice = "install a build of torch for it" if build == "cpu" else "its driver may be too old"
        yield Finding("warn", "device", found, advice)
        return
    free, total = current_platform.free_memory_bytes("cuda"), current_platform.total_memory_bytes("cuda")
    yield Finding("ok", "device", f"cuda: {current_platform.device_name()}, {current_platform.arch()}")
    yield Finding("ok", "driver", driver(NVIDIA_DRIVER))
    if free < total / 2:
        advice = "others use it: nvidia-smi lists who"
        yield Finding("warn", "device memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", advice)
    else:
        yield Finding("ok", "device memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free")
    yield libraries(importlib.metadata.requires("mstar") or (), "cuda")


def driver(path: Path) -> str:
    """Version of NVIDIA's kernel module, from its line `NVRM version: ... Kernel Module  VERSION  DATE`."""
    try:
        words = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def processor() -> Finding:
    if host.has_bf16():
        return Finding("ok", "bf16 in hardware", "yes")
    return Finding("ok", "bf16 in hardware", "no: float32 is the default on the processor")


def memory(free_bytes: int, total_bytes: int) -> Finding:
    found = f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB"
    if free_bytes < LEAST_MEMORY_BYTES:
        return Finding("warn", "free memory", found, "the smallest models need 2 GiB with their caches")
    return Finding("ok", "free memory", found)


def shared_memory(path: Path) -> Finding:
    """Workers hand tensors to each other through it."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return Finding("warn", "shared memory", f"no {path}", "deployments of several workers need it: mount a tmpfs")
    found = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free at {path}"
    if usage.free < LEAST_SHARED_BYTES:
        advice = "too little for deployments of several workers; in a container: --shm-size=1g"
        return Finding("warn", "shared memory", found, advice)
    return Finding("ok", "shared memory", found)


def descriptors(soft: int, hard: int) -> Finding:
    """The front raises the soft limit to the hard one and keeps some for itself."""
    if hard == resource.RLIM_INFINITY:
        return Finding("ok", "file descriptors", "no limit")
    connections = max(1, hard - KEPT_DESCRIPTORS)
    found = f"{soft}, up to {hard}: {connections} connections"
    if connections < LEAST_CONNECTIONS:
        return Finding("warn", "file descriptors", found, "raise the hard limit: ulimit -Hn, or LimitNOFILE=")
    return Finding("ok", "file descriptors", found)


def compiler() -> Finding:
    path = shutil.which("g++") or shutil.which("c++")
    if path is None:
        advice = "faster ones are built where there is one; Debian: apt-get install g++"
        return Finding("warn", "C++ compiler", "none: the torch kernels are used", advice)
    return Finding("ok", "C++ compiler", path)


def directory(name: str, path: Path, variable: str, *, least_bytes: int) -> Finding:
    """A place that will be written to; it need not be there yet."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("fail", name, f"{path} cannot be written to", f"set {variable} to a directory of this user")
    free = shutil.disk_usage(there).free
    found = f"{path}, {free / GIB:.1f} GiB free"
    if free < least_bytes:
        return Finding("warn", name, found, f"checkpoints may not fit: make room, or set {variable}")
    return Finding("ok", name, found)


def port(server: ServerConfig) -> Finding:
    """Whether a server could listen now."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    where = f"{server.host}:{server.port}"
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((server.host, server.port))
        except OSError as error:
            advice = "end what has it, or choose another with --port"
            return Finding("warn", "port", f"{where}: {os.strerror(error.errno) if error.errno else error}", advice)
    return Finding("ok", "port", f"{where} is free")
