"""Facts about the host: processor features, cores and memory that this process may use. Reads /proc and the control
group; loads no torch and changes nothing."""

import os
import platform
import time
from functools import cache
from pathlib import Path

_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, either inside WSL
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86: bf16 dot products; arm64: BFDOT and BFMMLA


@cache
def architecture() -> str:
    """Machine name as the kernel gives it: x86_64, aarch64, ..."""
    return platform.machine().lower()


@cache
def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of the first processor; empty where the system does not list them."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return frozenset()


def has_bf16() -> bool:
    """True when the processor multiplies bf16 in hardware. Without that bf16 is emulated and slower than fp32."""
    return not _BF16_FLAGS.isdisjoint(processor_flags())


def has_accelerator() -> bool:
    """True where a driver for an accelerator has made its device. A worker may still find that torch cannot use it."""
    return any(Path(device).exists() for device in _ACCELERATORS)


def num_cores() -> int:
    """Cores that this process may run on: its affinity mask, cut by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota))) if quota else cores


def process_cpu_s(pid: int) -> float:
    """Processor time that all threads of a process have used, until it is reaped; by the clock that
    `clock_getcpuclockid(3)` names for it.

    Raises:
        OSError: there is none.
    """
    return time.clock_gettime(~pid << 3 | 2)


def total_memory_bytes() -> int:
    """Memory of the machine, or the control group's limit where that is lower."""
    total = _meminfo().get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_bytes("memory.max")
    return min(total, limit) if limit is not None else total


def free_memory_bytes() -> int:
    """Memory that can still be taken without swapping: what the kernel calls available, cut by what is left of the
    control group's limit. Pages of files that have not been used lately count as free in both."""
    meminfo = _meminfo()
    free = meminfo.get("MemAvailable") or meminfo.get("MemFree") or total_memory_bytes()
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - max(0, used - _cgroup_unused_file_bytes())))


def _meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    sizes: dict[str, int] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields = value.split()
        if len(fields) == 2 and fields[1] == "kB":
            sizes[key] = int(fields[0]) * 1024
    return sizes


@cache
def _cgroup_dir() -> Path | None:
    """Directory of this process's control group (version 2), or None."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::"):
            root = Path("/sys/fs/cgroup")
            own = root / line[3:].lstrip("/")
            return own if (own / "memory.max").exists() else root  # inside a container the root is the own group
    return None


def _cgroup_bytes(name: str) -> int | None:
    group = _cgroup_dir()
    if group is None:
        return None
    try:
        text = (group / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _cgroup_unused_file_bytes() -> int:
    """Pages of files that the kernel drops first when the group needs memory: `inactive_file` of its statistics."""
    group = _cgroup_dir()
    if group is None:
        return 0
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _cgroup_quota() -> float | None:
    group = _cgroup_dir()
    if group is None:
        return None
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() else None
