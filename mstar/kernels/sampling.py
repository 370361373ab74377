"""Which device has kernels that take logits to tokens (`mstar.kernels.triton.kernels.SamplingKernels`).

Asked once, where a sampler is made. Without such kernels the sampler's own tensor functions do the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mstar.kernels.selection import triton_kernels

if TYPE_CHECKING:
    from mstar.kernels.triton.kernels import SamplingKernels


def sampling_kernels(device: torch.device) -> SamplingKernels | None:
    """Those of the device; None: it has none."""
    kernels = triton_kernels() if device.type == "cuda" else None
    return None if kernels is None else kernels.sampling
