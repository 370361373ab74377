"""Where Triton's kernels are tested: on a CUDA device or, without one, interpreted on the CPU. The interpreter cuts
bf16 instead of rounding it and multiplies it wrongly, so it runs in fp32 and over few shapes."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from mstar.kernels.triton.kernels import TritonKernels

ON_DEVICE = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_DEVICE else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if ON_DEVICE else [torch.float32]
KERNELS = TritonKernels()


def put(x: torch.Tensor) -> torch.Tensor:
    """`x` with its strides on the device; a view keeps what lies around it."""
    whole = x.new_empty(0).set_(x.untyped_storage())
    return whole.to(DEVICE).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def around(x: torch.Tensor) -> torch.Tensor:
    """All the memory that the view `x` is part of, on the CPU."""
    return x.new_empty(0).set_(x.untyped_storage()).cpu().clone()
