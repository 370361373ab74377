"""Memory of page pools. Load time."""

from __future__ import annotations

import logging
import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of a pool. On a CPU the memory is taken page by page as it is first written: numpy asks the kernel for
    zeroed pages, where `torch.zeros` would write all of them at start-up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that an accelerator copies from and to, and of which it takes no more than they need:
    torch's own allocator of such memory rounds up to a power of two. Released with the tensor, whose copies must have
    ended. Memory that cannot be pinned is used all the same, with a warning."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes)  # whole pages of its own: two areas that are pinned must not share one
    tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    assert runtime is not None, "memory is pinned for an accelerator"
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
    except RuntimeError as error:
        log.warning("%d bytes of host memory cannot be pinned (%s): copies to it wait for the device", num_bytes, error)
        _forget_error()
        return tensor

    def unregister(_: mmap.mmap) -> None:
        runtime.cudaHostUnregister(address)

    weakref.finalize(tensor, unregister, memory).atexit = False  # `memory`: it must not go before
    return tensor


def _forget_error() -> None:
    """The runtime names an error that a call has answered again at the next launch, once."""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        log.debug("the error of pinning is behind", exc_info=True)
