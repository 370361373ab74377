"""`current_platform` on a CPU, and with a torch that reports other devices."""

from types import SimpleNamespace

import pytest

from mstar.platforms import platform as module
from mstar.platforms.platform import Platform


def _torch(
    available: bool, hip: str | None = None, capability: tuple[int, int] = (9, 0), gcn: str = "", num_devices: int = 1
) -> SimpleNamespace:
    """The few facts of torch that a platform reads."""
    cuda = SimpleNamespace(
        device_count=lambda: num_devices,
        get_device_name=lambda: "A Fast One",
        is_available=lambda: available,
        get_device_capability=lambda: capability,
        get_device_properties=lambda: SimpleNamespace(gcnArchName=gcn),
        mem_get_info=lambda: (3 << 30, 4 << 30),
    )
    return SimpleNamespace(
        cuda=cuda, version=SimpleNamespace(hip=hip, cuda="13.0" if available and hip is None else None)
    )


def _platform(monkeypatch: pytest.MonkeyPatch, **facts) -> Platform:
    monkeypatch.setattr(module, "_torch", lambda: _torch(**facts))
    return Platform()


def test_without_an_accelerator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.host, "architecture", lambda: "x86_64")
    cpu = _platform(monkeypatch, available=False)
    assert (cpu.device_type(), cpu.arch(), cpu.is_rocm()) == ("cpu", "x86_64", False)
    assert not cpu.has_cuda_capability(1)


def test_nvidia(monkeypatch: pytest.MonkeyPatch):
    device = _platform(monkeypatch, available=True, capability=(8, 6))
    assert (device.device_type(), device.arch(), device.is_rocm()) == ("cuda", "sm86", False)
    assert [device.has_cuda_capability(*version) for version in ((8,), (8, 6), (8, 7), (9,))] == [
        True,
        True,
        False,
        False,
    ]
    assert device.has_bf16("cuda")
    assert (device.free_memory_bytes("cuda"), device.total_memory_bytes("cuda")) == (3 << 30, 4 << 30)


def test_an_old_nvidia_device_has_no_bf16(monkeypatch: pytest.MonkeyPatch):
    assert not _platform(monkeypatch, available=True, capability=(7, 5)).has_bf16("cuda")


def test_amd_is_cuda_to_torch_and_has_no_cuda_capability(monkeypatch: pytest.MonkeyPatch):
    device = _platform(monkeypatch, available=True, hip="6.4", gcn="gfx942:sramecc+:xnack-")
    assert (device.device_type(), device.arch(), device.is_rocm()) == ("cuda", "gfx942", True)
    assert not device.has_cuda_capability(7)
    assert device.has_bf16("cuda")


def test_what_a_device_and_a_build_are_called(monkeypatch: pytest.MonkeyPatch):
    assert _platform(monkeypatch, available=True).device_name() == "A Fast One"
    assert _platform(monkeypatch, available=True, num_devices=4).device_name() == "A Fast One, the first of 4"
    assert _platform(monkeypatch, available=True).torch_build() == "cuda 13.0"
    assert _platform(monkeypatch, available=True, hip="6.4").torch_build() == "rocm 6.4"
    assert _platform(monkeypatch, available=False).torch_build() == "cpu"


def test_the_real_torch_agrees_with_itself():
    import torch

    assert Platform().device_type() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert Platform().is_rocm() == (torch.version.hip is not None)
