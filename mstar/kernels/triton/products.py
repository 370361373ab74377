"""Products of one row with a weight matrix, where the library's kernels are bound by their latency.

Runs on the thread of the forward. The weights are read before the wait for the row: they are constant, and reading them
is nearly all the time that such a product takes. `mstar.kernels.triton.tile_products` has those of more rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.triton.launch import dependent_launch, next_power_of_2, wait_for_inputs

_MAX_IN = 8192


@triton.jit
def _product_kernel(
    x, weight, bias, out, num_out, weight_stride,
    NUM_IN: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`GATED`: the weights are ``num_out`` rows for gates and as many for what they let through."""
    o = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i = tl.arange(0, BLOCK_IN)
    is_out = o < num_out
    inside = is_out[:, None] & (i < NUM_IN)[None, :]
    at = weight + o.to(tl.int64)[:, None] * weight_stride + i[None, :]
    w = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    if GATED:
        at = weight + (num_out + o).to(tl.int64)[:, None] * weight_stride + i[None, :]
        up_w = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    inputs = tl.load(x + i, mask=i < NUM_IN, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(w.to(tl.float32) * inputs, 1)
    if BIAS:
        y += tl.load(bias + o, mask=is_out, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_w.to(tl.float32) * inputs, 1)
        if BIAS:
            up += tl.load(bias + num_out + o, mask=is_out, other=0.0).to(tl.float32)
        # Rounded where the product and the activation round as kernels of their own.
        y = y.to(x.dtype.element_ty).to(tl.float32)
        y = y * tl.sigmoid(y) * up.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + o, y.to(out.dtype.element_ty), mask=is_out)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``out = x @ weight.T + bias`` for ``x [1, in_features]``; ``out [1, out_features]``, bf16 or fp32."""
    return _launch(x, weight, bias, out, weight.shape[0], gated=False)


def gated_row_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``out = silu_and_mul(x @ weight.T + bias)`` for ``x [1, in_features]``."""
    return _launch(x, weight, bias, out, weight.shape[0] // 2, gated=True)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, num_out: int, *, gated: bool) -> Tensor:
    rows, num_in = x.shape
    if rows != 1 or num_in > _MAX_IN or not x.stride(1) == weight.stride(1) == out.stride(1) == 1:
        return NotImplemented
    if weight.dtype is not torch.bfloat16 or x.dtype is not torch.bfloat16:
        return NotImplemented
    block_out, num_warps = _shape(num_in)
    _product_kernel[(triton.cdiv(num_out, block_out),)](
        x, weight, x if bias is None else bias, out, num_out, weight.stride(0),
        NUM_IN=num_in, BLOCK_IN=next_power_of_2(num_in), BLOCK_OUT=block_out, GATED=gated,
        BIAS=bias is not None, num_warps=num_warps, **dependent_launch(x),
    )  # fmt: skip
    return out


def _shape(num_in: int) -> tuple[int, int]:
    """Outputs and warps of a program; measured on an H200, where others are slower or run out of registers."""
    return (8, 8) if 2048 < num_in <= 4096 else (4, 4) if num_in <= 4096 else (2, 8)
