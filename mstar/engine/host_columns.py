"""Small host arrays on their way to the device, outside of a step's staging block. Executor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """`values` on `device`, in stream order. Does not wait for the device: a copy from memory that is not pinned has
    read it all when the call returns, so the array may be let go of. On a CPU the tensor shares the array's memory."""
    return torch.from_numpy(values).to(device, non_blocking=True)
