"""`mstar check` as the machine's doctor: each line for a machine that will do, and for one that will not."""

import importlib.metadata
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.command_line import command

import mstar
from mstar.cli import machine
from mstar.cli.machine import GIB, Finding
from mstar.config.schema import ServerConfig
from mstar.platforms import current_platform

NAMES = ["system", "python", "mstar", "libraries", "torch", "device", "cores", "bf16 in hardware", "free memory"]
NAMES += ["shared memory", "file descriptors", "C++ compiler", "sockets", "cache", "checkpoint cache", "port"]


def test_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(current_platform, "device_type", lambda: "cpu")
    monkeypatch.setattr(current_platform, "has_accelerator", lambda: False)
    found = {finding.name: finding for finding in machine.examine()}
    assert [name for name in found if not name.startswith("MSTAR_")] == NAMES
    assert all(finding.advice for finding in found.values() if finding.level != "ok")
    assert found["mstar"].found == mstar.__version__
    assert found["libraries"].level == "ok", found["libraries"]
    assert importlib.metadata.version("torch") in found["torch"].found


def test_lines_and_exit_code():
    console = Console(record=True, width=200)
    findings = [Finding("ok", "cores", "2"), Finding("warn", "port", "[red]taken", "choose another")]
    assert machine.show(console, findings)
    assert (
        console.export_text()
        == "  ok  cores             2\nwarn  port              [red]taken\n" + " " * 24 + "choose another\n"
    )
    assert not machine.show(Console(quiet=True), [*findings, Finding("fail", "cache", "no", "do")])


def test_a_taken_port_is_said_of_the_configuration_that_wants_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        finding = machine.port(ServerConfig(port=number))
        assert finding.level == "warn" and f"127.0.0.1:{number}: Address already in use" in finding.found
        result = command("check", "--set", f"server.port={number}")
        assert f"warn  port              127.0.0.1:{number}" in result.stdout
    assert machine.port(ServerConfig(port=number)).level == "ok"
    assert machine.port(ServerConfig(host="192.0.2.1")).level == "warn"


REQUIRES = [
    "numpy>=2.0",
    "no-such-library>=1",
    "pyyaml>=999",
    'flashinfer-python>=0.6; extra == "cuda"',
    'numpy>=1; extra == "cuda"',
    'gone; python_version < "3"',
]


def test_libraries_of_a_version_of_their_own():
    assert machine.libraries(REQUIRES[:1] + REQUIRES[3:]) == Finding("ok", "libraries", "1, all as required")
    finding = machine.libraries(REQUIRES)
    assert finding.level == "fail" and finding.advice == "pip install --upgrade mstar"
    version = importlib.metadata.version("pyyaml")
    assert finding.found == f"no-such-library is missing; pyyaml is {version} and not >=999"
    extra = machine.libraries(REQUIRES, "cuda")
    assert (extra.level, extra.name, extra.advice) == ("warn", "extra cuda", "pip install --upgrade 'mstar[cuda]'")
    assert extra.found == "flashinfer-python is missing"
    assert machine.libraries([]).level == "warn"


@pytest.mark.parametrize(
    ("free", "level"),
    [(machine.LEAST_MEMORY_BYTES - 1, "warn"), (machine.LEAST_MEMORY_BYTES, "ok")],
)
def test_memory(free: int, level: str):
    assert machine.memory(free, 64 * GIB).level == level


def usage(free: int) -> SimpleNamespace:
    return SimpleNamespace(free=free, total=2 * free)


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert machine.shared_memory(tmp_path / "none").level == "warn"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 20))
    finding = machine.shared_memory(tmp_path)
    assert finding.level == "warn" and "--shm-size" in finding.advice and "0.06 of 0.12 GiB" in finding.found
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(GIB))
    assert machine.shared_memory(tmp_path).level == "ok"


def test_descriptors():
    assert machine.descriptors(1024, 4096) == Finding("ok", "file descriptors", "1024, up to 4096: 3968 connections")
    assert machine.descriptors(256, 256).level == "warn"
    assert machine.descriptors(1024, resource.RLIM_INFINITY).level == "ok"


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inside = tmp_path / "not" / "there" / "yet"
    assert machine.directory("cache", inside, "X", least_bytes=0).level == "ok"
    assert not inside.exists() and not inside.parent.exists(), "it only looks"
    (tmp_path / "file").touch()
    blocked = machine.directory("cache", tmp_path / "file" / "below", "MSTAR_CACHE_DIR", least_bytes=0)
    assert blocked.level == "fail" and "MSTAR_CACHE_DIR" in blocked.advice
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    assert machine.directory("cache", tmp_path, "X", least_bytes=0).level == "fail"
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(GIB))
    assert machine.directory("cache", tmp_path, "X", least_bytes=2 * GIB).level == "warn"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert machine.compiler().level == "warn" and "apt-get install" in machine.compiler().advice


def test_driver(tmp_path: Path):
    path = tmp_path / "version"
    assert machine.driver(path) == "unknown"
    for text, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 13.3\n", "580.65.06"),
        ("", "unknown"),
        ("NVRM version:\n", "unknown"),
    ):
        path.write_text(text)
        assert machine.driver(path) == version


def device_as(monkeypatch: pytest.MonkeyPatch, **answers: object) -> dict[str, Finding]:
    for name, answer in answers.items():
        monkeypatch.setattr(current_platform, name, lambda *_, answer=answer: answer)
    return {finding.name: finding for finding in machine.device()}


def test_an_accelerator_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch):
    for build, advice in (("cpu", "install a build of torch for it"), ("cuda 13.0", "its driver may be too old")):
        found = device_as(monkeypatch, device_type="cpu", has_accelerator=True, torch_build=build)
        assert found["device"].level == "warn" and found["device"].advice == advice
        assert f"built for {build}" in found["torch"].found


@pytest.mark.parametrize(("free", "level"), [(39 * GIB, "warn"), (79 * GIB, "ok")])
def test_an_accelerator(monkeypatch: pytest.MonkeyPatch, free: int, level: str):
    found = device_as(
        monkeypatch,
        device_type="cuda",
        torch_build="cuda 13.0",
        device_name="A Fast One, the first of 2",
        arch="sm90",
        free_memory_bytes=free,
        total_memory_bytes=80 * GIB,
    )
    assert found["device"] == Finding("ok", "device", "cuda: A Fast One, the first of 2, sm90")
    assert found["device memory"].level == level and "of 80.0 GiB free" in found["device memory"].found
    assert {"driver", "extra cuda"} <= found.keys()
