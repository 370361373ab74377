"""What the kernels should compute, in double precision and written from the formulas alone, with bounds on how far
fp32 accumulation and one rounding per documented place may lead away from it."""

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
"""Relative error of one rounding to nearest, with a factor of two to spare."""


class Expected(NamedTuple):
    value: Tensor
    bound: Tensor

    def first(self, rows: int) -> "Expected":
        return Expected(self.value[:rows], self.bound[:rows])

    def check(self, got: Tensor) -> None:
        error = (got.double() - self.value).abs()
        assert torch.isfinite(got).all()
        assert (error <= self.bound).all(), f"error {(error - self.bound).max():.3g} above its bound"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Expected:
    """The bound of a sum of n terms in fp32 is proportional to the sum of their sizes."""
    wide_x, wide_w = x.double(), weight.double()
    value, size = wide_x @ wide_w.T, wide_x.abs() @ wide_w.abs().T
    if bias is not None:
        value, size = value + bias.double(), size + bias.double().abs()
    return Expected(value, size * 2.0**-21 + value.abs() * ROUNDING[out_dtype])


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Expected:
    wide = x.double()
    value = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    value = value * (1 + weight.double() if zero_centered else weight.double())
    return Expected(value, value.abs() * 2 * (ROUNDING[x.dtype] + 2.0**-21) + 1e-30)


def rotated(heads: Tensor, angles: Tensor) -> Expected:
    """`heads [tokens, heads, dim]` by `angles [tokens, half]`: the plane (i, i + half) turns by angle i."""
    half = angles.shape[1]
    wide = heads.double()
    turned = torch.view_as_complex(torch.stack([wide[..., :half], wide[..., half : 2 * half]], -1))
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    value = torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], -1)
    size = wide[..., : 2 * half].abs().reshape(*wide.shape[:2], 2, half).sum(2).repeat(1, 1, 2)
    bound = torch.cat([size * 2.0**-21, torch.zeros_like(wide[..., 2 * half :])], -1)
    return Expected(value, bound + value.abs() * ROUNDING[heads.dtype])


def silu_and_mul(gate_up: Tensor) -> Expected:
    gate, up = gate_up.double().chunk(2, -1)
    value = gate * up / (1 + torch.exp(-gate))
    return Expected(value, value.abs() * (ROUNDING[gate_up.dtype] + 2.0**-20) + 1e-30)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Expected:
    value = x.double() / (1 + torch.exp(-gate.double()))
    return Expected(value, value.abs() * (ROUNDING[x.dtype] + 2.0**-20) + 1e-30)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Expected:
    heads = x.unflatten(-1, (-1, weight.shape[0]))
    value = rms_norm(heads, weight, eps, False).value.view(x.shape) * z.double() / (1 + torch.exp(-z.double()))
    return Expected(value, value.abs() * (3 * ROUNDING[x.dtype] + 2.0**-19) + 1e-30)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Expected:
    """One row: `q [q_len, heads, dim]` over `k, v [kv_len, kv_heads, dim]`; the last query sees every key.

    Weights are rounded to the dtype once, so the bound is proportional to the weighted sizes of the values.
    """
    group = q.shape[1] // k.shape[1]
    value, bound = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = k.shape[0] - q.shape[0] + i + 1 if causal else k.shape[0]
        if seen <= 0:
            continue
        for h in range(q.shape[1]):
            keys, values = k[:seen, h // group].double(), v[:seen, h // group].double()
            weights = torch.softmax(keys @ q[i, h].double() * scale, 0)
            value[i, h] = weights @ values
            bound[i, h] = weights @ values.abs() * (ROUNDING[q.dtype] + 2.0**-17)
    return Expected(value, bound + value.abs() * ROUNDING[q.dtype] + 1e-30)
