"""A layer of the gated delta rule with random weights and states, for whatever computes it, and its rows in double
precision, from the formulas alone."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

PAST = 3
"""Inputs that the convolution remembers."""
NAN = float("nan")


class Kind(NamedTuple):
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


class DeltaLayer:
    """Random weights, on the CPU, and a pool of states on `device`; what no row owns is NaN. Inputs are columns of one
    projection: of the convolution, `b`, `a`, and five that nobody reads."""

    def __init__(self, kind: Kind, dtype: torch.dtype, device: torch.device | None = None, slots: int = 9) -> None:
        self.key_heads, self.heads, self.key_dim, self.value_dim = kind
        self.channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        self.width = self.heads * self.value_dim
        self.dtype = dtype
        self.conv_weight = torch.randn(self.channels, PAST + 1).to(dtype)
        self.a_log, self.dt_bias = torch.randn(self.heads), torch.randn(self.heads)
        self.conv_state = torch.full((slots, PAST, self.channels), NAN, dtype=dtype, device=device)
        self.delta_state = torch.full((slots, self.heads, self.key_dim, self.value_dim), NAN, device=device)

    def inputs(self, tokens: int) -> Tensor:
        return (torch.randn(tokens, self.channels + 2 * self.heads + 5) * 2).to(self.dtype)

    def columns(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; `b`; `a`."""
        qkv, b, a, _ = x.split([self.channels, self.heads, self.heads, x.shape[1] - self.channels - 2 * self.heads], 1)
        return qkv, b, a


class DeltaRow:
    """One row: a token at a time, over all it has seen. Heads go together."""

    def __init__(self, layer: DeltaLayer) -> None:
        self.layer = layer
        self.seen = [torch.zeros(layer.channels).double()] * PAST
        self.state = torch.zeros(layer.heads, layer.key_dim, layer.value_dim).double()

    def feed(self, x: Tensor) -> Tensor:
        """`inputs` of its next tokens → `[tokens, heads * value_dim]`."""
        return torch.stack([self._token(token.double()) for token in x])

    def _token(self, x: Tensor) -> Tensor:
        m = self.layer
        self.seen.append(x[: m.channels])
        taps = [self.seen[-1 - i] * m.conv_weight[:, PAST - i].double() for i in range(PAST + 1)]
        mixed = torch.stack(taps).sum(0)
        mixed = mixed / (1 + torch.exp(-mixed))
        width = m.key_heads * m.key_dim
        q, k = (mixed[at : at + width].view(m.key_heads, m.key_dim) for at in (0, width))
        q, k = (each[torch.arange(m.heads) // (m.heads // m.key_heads)] for each in (q, k))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        v = mixed[2 * width :].view(m.heads, m.value_dim)
        beta = 1 / (1 + torch.exp(-x[m.channels :][: m.heads, None]))
        step = torch.log1p(torch.exp(x[m.channels + m.heads :][: m.heads] + m.dt_bias.double()))
        decayed = self.state * torch.exp(-m.a_log.double().exp() * step)[:, None, None]
        added = beta * (v - torch.einsum("hk,hkv->hv", k, decayed))
        self.state = decayed + torch.einsum("hk,hv->hkv", k, added)
        return torch.einsum("hk,hkv->hv", q / math.sqrt(m.key_dim), self.state).flatten()


def check_close(got: Tensor, expected: Tensor) -> None:
    """One rounding to the dtype of `got` beside what sums in fp32 lose."""
    rounding = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8}[got.dtype]
    assert torch.isfinite(got).all()
    assert ((got.double() - expected).abs() <= rounding * expected.abs() + 2e-5 * expected.abs().max()).all()
