"""How the kernels are launched: power-of-two blocks, programmatic dependent launch, and dots of either dtype.

Runs on the thread of the forward. With programmatic dependent launch a kernel starts while the one before it still runs
and waits for its results itself. Before `wait_for_inputs` a kernel may therefore read only what was there before the
forward: weights, a step's staged columns, states that this forward has not written. Any other tensor may still be in
the making, and not by the previous kernel alone, since several may overlap.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar.platforms import current_platform


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def dependent_launch(x: Tensor) -> dict[str, Any]:
    """Launch arguments: `PDL` for the kernel and, where the device can, the attribute of the launch."""
    if x.is_cuda and _can_launch_dependents():
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _can_launch_dependents() -> bool:
    return current_platform.has_cuda_capability(9)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """What comes next may begin, and read its weights, as soon as every program of this kernel has got here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the memory of the previous ones."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in fp32; fp32 operands are not shortened to tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")
