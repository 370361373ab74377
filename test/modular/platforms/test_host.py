"""Facts about the host, read from files that the test writes, and on the real machine compared with other sources."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mstar.platforms import current_platform, host

X86 = (
    "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse avx512f avx512_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\nCPU implementer\t: 0x41\n"


@pytest.fixture(autouse=True)
def _fresh_caches():
    host.processor_flags.cache_clear()
    host._cgroup_dir.cache_clear()
    yield
    host.processor_flags.cache_clear()
    host._cgroup_dir.cache_clear()


@pytest.mark.parametrize(("text", "flag", "other"), [(X86, "avx512_bf16", "amx_tile"), (ARM, "bf16", "avx2")])
def test_flags_of_the_first_processor(tmp_path: Path, text: str, flag: str, other: str):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    flags = host.processor_flags(path)
    assert flag in flags
    assert other not in flags


def test_a_system_without_cpuinfo_has_no_flags(tmp_path: Path):
    assert host.processor_flags(tmp_path / "missing") == frozenset()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx512f"}, False),
        ({"avx512f", "avx512_bf16"}, True),
        ({"amx_bf16"}, True),
        ({"asimd", "bf16"}, True),
        (set(), False),
    ],
)
def test_bf16_needs_its_instructions(monkeypatch: pytest.MonkeyPatch, flags: set[str], expected: bool):
    monkeypatch.setattr(host, "processor_flags", lambda: frozenset(flags))
    assert host.has_bf16() is expected
    assert current_platform.has_bf16("cpu") is expected


def _cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text + "\n")
    monkeypatch.setattr(host, "_cgroup_dir", lambda: folder)


def test_a_memory_limit_cuts_what_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(host, "_meminfo", lambda: {"MemTotal": 8 << 30, "MemAvailable": 6 << 30})
    _cgroup(monkeypatch, tmp_path, memory_max=str(2 << 30), memory_current=str(1 << 29))
    assert host.total_memory_bytes() == 2 << 30
    assert host.free_memory_bytes() == (2 << 30) - (1 << 29)


def test_cached_files_of_a_group_do_not_count_as_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(host, "_meminfo", lambda: {"MemTotal": 8 << 30, "MemAvailable": 6 << 30})
    stat = f"anon 5\ninactive_file {1 << 30}\nactive_file 7"
    _cgroup(monkeypatch, tmp_path, memory_max=str(2 << 30), memory_current=str(3 << 29), memory_stat=stat)
    assert host.free_memory_bytes() == (2 << 30) - (1 << 29)


def test_a_group_that_is_over_its_limit_has_nothing_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(host, "_meminfo", lambda: {"MemTotal": 8 << 30, "MemAvailable": 6 << 30})
    _cgroup(monkeypatch, tmp_path, memory_max="1000", memory_current="2000")
    assert host.free_memory_bytes() == 0


def test_without_a_limit_the_kernel_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(host, "_meminfo", lambda: {"MemTotal": 8 << 30, "MemAvailable": 6 << 30})
    _cgroup(monkeypatch, tmp_path, memory_max="max", memory_current="123")
    assert host.total_memory_bytes() == 8 << 30
    assert host.free_memory_bytes() == 6 << 30


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_quota_cuts_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    _cgroup(monkeypatch, tmp_path, cpu_max=quota)
    assert host.num_cores() == expected


def test_meminfo_is_in_bytes(tmp_path: Path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       1024 kB\nMemAvailable:    512 kB\nHugePages_Total:       3\n")
    assert host._meminfo(path) == {"MemTotal": 1 << 20, "MemAvailable": 1 << 19}


def test_the_processor_time_of_a_process():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        ends = time.monotonic() + 20
        while host.process_cpu_s(process.pid) < 0.1:
            assert time.monotonic() < ends
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.05)
        stopped_at = host.process_cpu_s(process.pid)
        time.sleep(0.05)
        assert host.process_cpu_s(process.pid) == pytest.approx(stopped_at, abs=1e-4)
        process.kill()
    with pytest.raises(OSError):
        host.process_cpu_s(process.pid)
    before = time.process_time()
    assert before <= host.process_cpu_s(os.getpid()) <= time.process_time()


def test_this_machine():
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < current_platform.free_memory_bytes("cpu") <= current_platform.total_memory_bytes("cpu") <= pages
    assert 1 <= current_platform.num_cores() <= (os.cpu_count() or 1)
    assert host.architecture() == platform.machine().lower()
