"""`Platform`: the questions that code may ask about the device it runs on. Any process; imports torch only inside the
answers that need it, because the front process asks about the host and must stay free of torch."""

from functools import cache
from typing import TYPE_CHECKING, Literal

from mstar.platforms import host

if TYPE_CHECKING:
    import types

DeviceType = Literal["cpu", "cuda"]


@cache
def _torch() -> "types.ModuleType":
    import torch  # noqa: PLC0415    keeps processes that never ask about an accelerator free of torch

    return torch


class Platform:
    """Facts of this process's machine. Stateless; every answer is for the current process.

    An accelerator of either vendor is the device type `cuda`, as in torch; `is_rocm` tells them apart.
    """

    def device_type(self) -> DeviceType:
        """`cuda` when torch sees an accelerator, else `cpu`."""
        return "cuda" if _torch().cuda.is_available() else "cpu"

    def has_accelerator(self) -> bool:
        """Whether there seems to be an accelerator. No torch, so that the front may ask before a worker finds out."""
        return host.has_accelerator()

    def is_rocm(self) -> bool:
        """True when torch was built for AMD accelerators, whether or not one is present."""
        return _torch().version.hip is not None

    def arch(self) -> str:
        """Architecture of the device that models run on: `sm90`, `gfx942`, or the processor's (`x86_64`)."""
        if self.device_type() == "cpu":
            return host.architecture()
        torch = _torch()
        if self.is_rocm():
            return torch.cuda.get_device_properties().gcnArchName.split(":")[0]
        major, minor = torch.cuda.get_device_capability()
        return f"sm{major}{minor}"

    def has_cuda_capability(self, major: int, minor: int = 0) -> bool:
        """True on an NVIDIA device of compute capability `major.minor` or newer; False on ROCm and on a CPU."""
        if self.device_type() == "cpu" or self.is_rocm():
            return False
        return _torch().cuda.get_device_capability() >= (major, minor)

    def has_bf16(self, device_type: DeviceType) -> bool:
        """True when bf16 arithmetic is done in hardware there."""
        if device_type == "cpu":
            return host.has_bf16()
        return self.is_rocm() or self.has_cuda_capability(8)

    def device_name(self) -> str:
        """The accelerator's name, with how many there are where it is not the only one."""
        cuda = _torch().cuda
        count = cuda.device_count()
        return cuda.get_device_name() + ("" if count == 1 else f", the first of {count}")

    def torch_build(self) -> str:
        """What torch was built for: `cuda 13.0`, `rocm 7.0`, or `cpu`."""
        version = _torch().version
        if version.hip is not None:
            return f"rocm {version.hip}"
        return "cpu" if version.cuda is None else f"cuda {version.cuda}"

    def num_cores(self) -> int:
        """Processor cores that this process may use. No torch."""
        return host.num_cores()

    def free_memory_bytes(self, device_type: DeviceType) -> int:
        """Bytes that can be allocated now on the current device of that type. No torch for `cpu`."""
        if device_type == "cpu":
            return host.free_memory_bytes()
        free, _ = _torch().cuda.mem_get_info()
        return free

    def total_memory_bytes(self, device_type: DeviceType) -> int:
        """Bytes of memory on the current device of that type. No torch for `cpu`."""
        if device_type == "cpu":
            return host.total_memory_bytes()
        _, total = _torch().cuda.mem_get_info()
        return total
