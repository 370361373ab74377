"""Norms, gates and look-ups, each row of the result by itself; specified by `mstar.kernels.reference`.

Runs on the thread of the forward. Values are computed in fp32 and rounded where the reference rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.kernels.triton.launch import dependent_launch, next_power_of_2, wait_for_inputs

_MAX_WIDTH = 32768
_COLUMNS = 1024  # of one program, where columns do not depend on each other


@triton.jit
def _norm_kernel(
    x, residual, weight, out, eps, inner, x_outer, x_inner, x_part, residual_outer, out_outer, out_inner,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    at = x + (row // inner) * x_outer + (row % inner) * x_inner + columns
    value = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(at + part * x_part, mask=inside, other=0.0)
    if ADD:
        at = residual + row * residual_outer + columns
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + value.to(DTYPE).to(tl.float32)
        value = total.to(DTYPE)
        tl.store(at, value, mask=inside)
    wide = value.to(tl.float32)
    normalized = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    if ZERO_CENTERED:
        result = normalized * (1.0 + scale)
    else:
        result = normalized.to(DTYPE).to(tl.float32) * scale
    to = out + (row // inner) * out_outer + (row % inner) * out_inner + columns
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None, zero_centered: bool
) -> Tensor:
    """`mstar.kernels.ops.rms_norm` and, with a residual, `fused_add_rms_norm`."""
    width = x.shape[-1]
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    layout, out_layout = _outer_inner(x), _outer_inner(out)
    if layout is None or out_layout is None or weight.stride(0) != 1 or not 0 < width <= _MAX_WIDTH:
        return NotImplemented
    outer, inner, x_outer, x_inner = layout
    if residual is not None and (inner != 1 or residual.dim() != 2 or residual.stride(1) != 1):
        return NotImplemented
    if outer * inner == 0:
        return out
    block = next_power_of_2(width)
    _norm_kernel[(outer * inner,)](
        x, x if residual is None else residual, weight, out, eps, inner, x_outer, x_inner, 0,
        0 if residual is None else residual.stride(0), out_layout[2], out_layout[3],
        WIDTH=width, BLOCK=block, PARTS=1, ADD=residual is not None, ZERO_CENTERED=zero_centered,
        num_warps=_num_warps(block), **dependent_launch(x),
    )  # fmt: skip
    return out


def sum_and_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """`norm` with a residual, of the sum of ``parts [parts, rows, width]`` (fp32) in the residual's dtype."""
    num_parts, rows, width = parts.shape
    out = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    block = next_power_of_2(width)
    _norm_kernel[(rows,)](
        parts, residual, weight, out, eps, 1, parts.stride(1), 0, parts.stride(0), residual.stride(0), out.stride(0), 0,
        WIDTH=width, BLOCK=block, PARTS=num_parts, ADD=True, ZERO_CENTERED=zero_centered,
        num_warps=min(16, 2 * _num_warps(block)), **dependent_launch(residual),
    )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul_kernel(gate_up, out, width, x_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + token * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor, out: Tensor | None) -> Tensor:
    if gate_up.dim() != 2 or gate_up.stride(1) != 1:
        return NotImplemented
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.stride(1) != 1:
        return NotImplemented
    if tokens:
        _silu_and_mul_kernel[(tokens, triton.cdiv(width, _COLUMNS))](
            gate_up, out, width, gate_up.stride(0), out.stride(0), BLOCK=_COLUMNS, num_warps=4,
            **dependent_launch(gate_up),
        )  # fmt: skip
    return out


@triton.jit
def _sigmoid_mul_kernel(
    x, gate, width, x_stride, gate_stride, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if PER_TOKEN:
        opened = tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
    else:
        opened = tl.sigmoid(tl.load(gate + token * gate_stride + columns, mask=inside, other=0.0).to(tl.float32))
    value = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32) * opened
    tl.store(x + token * x_stride + columns, value.to(x.dtype.element_ty), mask=inside)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    if x.dim() != 2 or gate.dim() != 2 or x.stride(1) != 1 or (gate.stride(1) != 1 and gate.shape[1] != 1):
        return NotImplemented
    tokens, width = x.shape
    if tokens:
        _sigmoid_mul_kernel[(tokens, triton.cdiv(width, _COLUMNS))](
            x, gate, width, x.stride(0), gate.stride(0), BLOCK=_COLUMNS, PER_TOKEN=gate.shape[1] != width,
            num_warps=4, **dependent_launch(x),
        )  # fmt: skip
    return x


@triton.jit
def _gated_norm_kernel(
    x, z, weight, out, eps, heads, x_stride, z_stride, out_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    inner = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (inner < DIM)
    scale = tl.load(weight + inner, mask=inner < DIM, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    columns = head * DIM + inner
    wide = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + columns, mask=inside, other=0.0).to(tl.float32)
    normalized = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]).to(x.dtype.element_ty).to(tl.float32)
    result = (normalized * scale).to(x.dtype.element_ty).to(tl.float32) * (gate * tl.sigmoid(gate))
    tl.store(out + token * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm(wide, gate, scale, eps, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Of one head in another kernel; all arguments are fp32, and the caller rounds the result once more."""
    normalized = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)).to(DTYPE).to(tl.float32)
    return (normalized * scale).to(DTYPE).to(tl.float32) * (gate * tl.sigmoid(gate))


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    if x.dim() != 2 or x.stride(1) != 1 or z.stride(1) != 1 or weight.stride(0) != 1:
        return NotImplemented
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = weight.shape[0]
    heads = x.shape[1] // dim
    if x.shape[0]:
        block = next_power_of_2(dim)
        together = max(1, min(next_power_of_2(heads), 1024 // block))  # a head alone would be little for a program
        _gated_norm_kernel[(x.shape[0], triton.cdiv(heads, together))](
            x, z, weight, out, eps, heads, x.stride(0), z.stride(0), out.stride(0), DIM=dim, BLOCK=block,
            HEADS=together, num_warps=4, **dependent_launch(x),
        )  # fmt: skip
    return out


@triton.jit
def _embedding_kernel(
    ids, table, out, num_rows, width, table_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    inside = columns < width
    known_width = tl.where((row >= 0) & (row < num_rows), width, 0)
    value = tl.load(table + row * table_stride + columns, mask=columns < known_width, other=0.0)
    tl.store(out + token * out_stride + columns, value.to(out.dtype.element_ty), mask=inside)


def embedding(ids: Tensor, table: Tensor, out: Tensor | None) -> Tensor:
    """An id that the table has not gives zeros: the host cannot be told without a wait."""
    if table.dim() != 2 or table.stride(1) != 1 or ids.dim() != 1 or (ids.shape[0] > 1 and ids.stride(0) != 1):
        return NotImplemented
    tokens, width = ids.shape[0], table.shape[1]
    if out is None:
        out = torch.empty((tokens, width), dtype=table.dtype, device=table.device)
    if out.stride(1) != 1:
        return NotImplemented
    if tokens:
        _embedding_kernel[(tokens, triton.cdiv(width, _COLUMNS))](
            ids, table, out, table.shape[0], width, table.stride(0), out.stride(0), BLOCK=_COLUMNS, num_warps=4,
            **dependent_launch(table),
        )  # fmt: skip
    return out


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 256))


def _outer_inner(x: Tensor) -> tuple[int, int, int, int] | None:
    """``(outer, inner, outer stride, inner stride)`` of the leading dimensions; None if they are more than two."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return None
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    if x.dim() == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    return (x.numel() // x.shape[-1], 1, x.shape[-1], 0) if x.is_contiguous() and x.numel() else None
