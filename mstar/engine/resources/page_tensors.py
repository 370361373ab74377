"""Memory of page pools."""

from __future__ import annotations

import math

import numpy as np
import torch


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Zeros of a pool. On a CPU the memory is taken page by page as it is first written: numpy asks the kernel for
    zeroed pages, where `torch.zeros` would write all of them at start-up. `pinned`: an accelerator copies from it."""
    if device.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
