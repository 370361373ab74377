"""Products of some rows with a weight matrix on the tensor cores, where the library's kernels are bound by latency.

Runs on the thread of the forward. A program takes a tile of outputs. It reads its weights before the wait for the rows
if it holds them all at once, and goes through them in turns otherwise; both add the inputs up in the same order. Where
outputs are too few for all processors, inputs are divided into parts, which the reader adds up. How they are divided
follows from the matrix and from whether there are more than `FEW_ROWS` rows: on either side of that a row has the same
bits beside any others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.triton.launch import dependent_launch, dot, let_next_start, next_power_of_2, wait_for_inputs

FEW_ROWS = 32
MOST_ROWS = 128
"""That the kernels take."""
_MOST_WEIGHTS = 1 << 24
"""Of a matrix for more than `FEW_ROWS` rows: larger ones are not measured, and the library is good at them."""
_OUTPUTS = 64
_PROCESSORS = 132


class _Tiling(NamedTuple):
    """Measured on an H200. A program takes `inputs * turns` inputs."""

    inputs: int
    turns: int
    num_warps: int
    num_stages: int


@triton.jit
def _tile_kernel(
    x, weight, out, num_rows, num_in, num_out, x_stride, weight_stride, out_stride, part_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TURNS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`GATED`: the weights are ``num_out`` rows for gates and as many for what they let through; a tile has both."""
    let_next_start(PDL)
    begin = tl.program_id(1) * (INPUTS * TURNS)
    o = tl.arange(0, OUTPUTS)
    if GATED:
        n = tl.program_id(0) * (OUTPUTS // 2) + o // 2
        is_out = n < num_out
        n += (o % 2) * num_out
    else:
        n = tl.program_id(0) * OUTPUTS + o
        is_out = n < num_out
    r = tl.arange(0, ROWS)
    i = begin + tl.arange(0, INPUTS)
    w_at = weight + n.to(tl.int64)[:, None] * weight_stride + i[None, :]
    x_at = x + r[:, None] * x_stride + i[None, :]
    is_row = r < num_rows
    y = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if TURNS == 1:
        w = tl.load(w_at, mask=is_out[:, None] & (i < num_in)[None, :], other=0.0, eviction_policy="evict_first")
        wait_for_inputs(PDL)
        inputs = tl.load(x_at, mask=is_row[:, None] & (i < num_in)[None, :], other=0.0)
        y = dot(w, tl.trans(inputs), y)
    else:
        wait_for_inputs(PDL)
        for turn in range(TURNS):
            inside = (i < num_in - turn * INPUTS)[None, :]
            w = tl.load(w_at + turn * INPUTS, mask=is_out[:, None] & inside, other=0.0, eviction_policy="evict_first")
            inputs = tl.load(x_at + turn * INPUTS, mask=is_row[:, None] & inside, other=0.0)
            y = dot(w, tl.trans(inputs), y)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [OUTPUTS // 2, 2, ROWS]), [0, 2, 1]))
        # Rounded where the product and the activation round as kernels of their own.
        gate = gate.to(x.dtype.element_ty).to(tl.float32)
        y = gate * tl.sigmoid(gate) * up.to(x.dtype.element_ty).to(tl.float32)
        n = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
    to = out + tl.program_id(1).to(tl.int64) * part_stride + r[None, :] * out_stride + n[:, None]
    tl.store(to, y.to(out.dtype.element_ty), mask=(n < num_out)[:, None] & is_row[None, :])


def serves(x: Tensor, weight: Tensor) -> bool:
    """True for rows and layouts that the kernels take, where they win."""
    rows = x.shape[0]
    is_right_size = 1 < rows <= FEW_ROWS or (rows <= MOST_ROWS and weight.numel() <= _MOST_WEIGHTS)
    return is_right_size and x.stride(1) == weight.stride(1) == 1


def tile_product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """``out = x @ weight.T`` for ``x [rows, in_features]``; ``out [rows, out_features]``, any dtype."""
    tiles = triton.cdiv(weight.shape[0], _OUTPUTS)
    _launch(x, weight, out[None], tiles, _whole(x, tiles), gated=False)
    return out


def gated_tile_product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """``out = silu_and_mul(x @ weight.T)`` for ``x [rows, in_features]``."""
    tiles = triton.cdiv(weight.shape[0], _OUTPUTS)
    _launch(x, weight, out[None], tiles, _whole(x, tiles), gated=True)
    return out


def product_parts(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 ``[parts, rows, out_features]``, whose sum over the parts is ``x @ weight.T``."""
    tiles = triton.cdiv(weight.shape[0], _OUTPUTS)
    tiling = _divided(x, tiles)
    num_parts = triton.cdiv(x.shape[1], tiling.inputs * tiling.turns)
    parts = torch.empty((num_parts, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, parts, tiles, tiling, gated=False)
    return parts


def _launch(x: Tensor, weight: Tensor, out: Tensor, tiles: int, tiling: _Tiling, *, gated: bool) -> None:
    rows, num_in = x.shape
    num_parts, _, num_out = out.shape
    _tile_kernel[(tiles, num_parts)](
        x, weight, out, rows, num_in, num_out, x.stride(0), weight.stride(0), out.stride(1), out.stride(0),
        ROWS=max(16, next_power_of_2(rows)), OUTPUTS=_OUTPUTS, INPUTS=tiling.inputs, TURNS=tiling.turns, GATED=gated,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **dependent_launch(x),
    )  # fmt: skip


def _whole(x: Tensor, tiles: int) -> _Tiling:
    rows, num_in = x.shape
    # A tile's weights and the rows fit into a processor's memory, and every processor has one tile at most.
    if rows <= FEW_ROWS and num_in <= 1024 and tiles <= _PROCESSORS:
        return _Tiling(max(16, next_power_of_2(num_in)), 1, 8, 1)
    return _in_turns(num_in, 1)


def _divided(x: Tensor, tiles: int) -> _Tiling:
    rows, num_in = x.shape
    if rows <= FEW_ROWS and tiles * triton.cdiv(num_in, 256) <= 2 * _PROCESSORS:
        return _Tiling(256, 1, 4, 1)
    return _in_turns(num_in, max(1, min(triton.cdiv(num_in, 512), _PROCESSORS // tiles)))


def _in_turns(num_in: int, num_parts: int) -> _Tiling:
    return _Tiling(128, triton.cdiv(triton.cdiv(num_in, 128), num_parts), 4, 4)
