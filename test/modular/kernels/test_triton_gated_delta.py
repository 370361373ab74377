"""Triton's gated delta rule against the formulas, and its promises about slots, batches and cuts."""

import math

import pytest
import torch
from support.triton_device import DEVICE, DTYPES, KERNELS, ON_DEVICE, put
from torch import Tensor

from mstar.kernels.fused_norms import GatedNorm

PAST = 3
NAN = float("nan")
KINDS = [(2, 2, 128), (2, 4, 32), (1, 3, 16)] if ON_DEVICE else [(2, 2, 16), (1, 2, 32)]
"""(key heads, value heads, width of a head)"""
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Layer:
    """Random weights and a pool of states; what no row owns is NaN. Inputs are columns of one projection."""

    def __init__(self, kind: tuple[int, int, int], dtype: torch.dtype, slots: int = 9) -> None:
        self.key_heads, self.heads, self.dim = kind
        self.channels = (2 * self.key_heads + self.heads) * self.dim
        self.dtype = dtype
        self.conv_weight = torch.randn(self.channels, PAST + 1).to(dtype)
        self.a_log, self.dt_bias = torch.randn(self.heads), torch.randn(self.heads)
        self.on_device = [put(self.conv_weight.t().contiguous()).t(), put(self.a_log), put(self.dt_bias)]
        self.conv_state = torch.full((slots, PAST, self.channels), NAN, dtype=dtype, device=DEVICE)
        self.delta_state = torch.full((slots, self.heads, self.dim, self.dim), NAN, device=DEVICE)

    def inputs(self, tokens: int) -> Tensor:
        return (torch.randn(tokens, self.channels + 2 * self.heads + 5) * 2).to(self.dtype)

    def run(
        self,
        x: Tensor,
        lengths: list[int],
        slots: list[int],
        known: list[int],
        max_tokens: int | None = None,
        norm: GatedNorm | None = None,
    ) -> Tensor:
        device = put(x)
        b = device[:, self.channels : self.channels + self.heads]
        a = device[:, self.channels + self.heads : self.channels + 2 * self.heads]
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
        wide = torch.full((len(x), self.heads * self.dim + 3), 9.0, dtype=self.dtype, device=DEVICE)
        out = wide[:, : self.heads * self.dim]
        result = KERNELS.linear_attention.gated_delta(
            device[:, : self.channels], b, a, *self.on_device, self.conv_state, self.delta_state,
            torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            torch.tensor(known, dtype=torch.int32, device=DEVICE), starts, self.key_heads, out,
            max_tokens or max(lengths), norm,
        )  # fmt: skip
        assert result is not NotImplemented and (wide[:, self.heads * self.dim :] == 9).all()
        return out.cpu()


class Row:
    """One row in double precision, from the formulas: a token at a time, over all it has seen."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.seen = [torch.zeros(layer.channels).double()] * PAST
        self.state = torch.zeros(layer.heads, layer.dim, layer.dim).double()

    def feed(self, x: Tensor) -> Tensor:
        return torch.stack([self._token(token.double()) for token in x])

    def _token(self, x: Tensor) -> Tensor:
        m = self.layer
        self.seen.append(x[: m.channels])
        mixed = sum(self.seen[-1 - i] * m.conv_weight[:, PAST - i].double() for i in range(PAST + 1))
        mixed = mixed / (1 + torch.exp(-mixed))
        q, k, v = mixed.view(-1, m.dim).split([m.key_heads, m.key_heads, m.heads])
        q, k = (each[torch.arange(m.heads) // (m.heads // m.key_heads)] for each in (q, k))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        beta = 1 / (1 + torch.exp(-x[m.channels :][: m.heads, None]))
        step = torch.log1p(torch.exp(x[m.channels + m.heads :][: m.heads] + m.dt_bias.double()))
        decayed = self.state * torch.exp(-m.a_log.double().exp() * step)[:, None, None]
        added = beta * (v - torch.einsum("hk,hkv->hv", k, decayed))
        self.state = decayed + torch.einsum("hk,hv->hkv", k, added)
        return torch.einsum("hk,hkv->hv", q / math.sqrt(m.dim), self.state).flatten()


def close(got: Tensor, expected: Tensor) -> None:
    rounding = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8}[got.dtype]
    assert torch.isfinite(got).all()
    assert ((got.double() - expected).abs() <= rounding * expected.abs() + 2e-5 * expected.abs().max()).all()


@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_length_go_on_from_their_states(dtype: torch.dtype, kind: tuple[int, int, int]) -> None:
    layer = Layer(kind, dtype)
    lengths, slots = [1, 30, 2, 0, 5, 1], [4, 1, 7, 3, 2, 8]
    rows = [Row(layer) for _ in lengths]
    for step, known in enumerate(([0] * 6, [1] * 6, [1, 0, 1, 1, 0, 1])):
        for i, kept in enumerate(known):
            if not kept:
                rows[i] = Row(layer)
        x = layer.inputs(sum(lengths) + 2)
        x[-2:] = NAN  # padding tokens
        out = layer.run(x, lengths, slots, known)
        assert (out[-2:] == 9).all()
        start = 0
        for row, length, slot in zip(rows, lengths, slots, strict=True):
            if length:
                part = slice(start, start + length)
                close(out[part], row.feed(x[part]))
                close(layer.delta_state[slot].cpu(), row.state)
                assert torch.equal(layer.conv_state[slot].cpu().double(), torch.stack(row.seen[-PAST:]))
            start += length
        untouched = [0, 3, 5, 6]
        assert layer.conv_state[untouched].isnan().all() and layer.delta_state[untouched].isnan().all()
        lengths = [[1, 1, 1, 0, 1, 1], [3, 4, 1, 0, 2, 9], []][step]


@dtypes
def test_states_in_bf16(dtype: torch.dtype) -> None:
    """Each step goes on from what the last one has stored."""
    layer = Layer(KINDS[0], dtype)
    layer.delta_state = layer.delta_state.to(torch.bfloat16)
    rows = {3: Row(layer), 1: Row(layer)}
    for step in range(3):
        x = layer.inputs(2)
        out = layer.run(x, [1, 1], list(rows), [int(step > 0)] * 2)
        for i, (slot, row) in enumerate(rows.items()):
            close(out[i : i + 1], row.feed(x[i : i + 1]))
            stored = layer.delta_state[slot].cpu().double()
            assert ((stored - row.state).abs() <= 2.0**-7 * row.state.abs() + 1e-5).all()
            row.state = stored
    assert layer.delta_state[[0, 2, 4, 5, 6, 7, 8]].isnan().all()


@dtypes
def test_a_row_without_a_slot_gets_zeros_and_touches_nothing(dtype: torch.dtype) -> None:
    layer = Layer(KINDS[0], dtype)
    x = layer.inputs(5)
    got = layer.run(x, [2, 2, 1], [-1, 3, -1], [1, 0, 0])
    assert (got[:2] == 0).all() and (got[4:] == 0).all()
    close(got[2:4], Row(layer).feed(x[2:4]))
    assert layer.delta_state[[0, 1, 2, 4, 5, 6, 7, 8]].isnan().all()


@dtypes
@pytest.mark.parametrize("kind", KINDS[:2])
def test_any_batch_and_any_cut_give_the_same_bits(dtype: torch.dtype, kind: tuple[int, int, int]) -> None:
    layer = Layer(kind, dtype)
    lengths = [9, 3, 1, 6]
    x = layer.inputs(sum(lengths))
    together = layer.run(x, lengths, [1, 2, 3, 4], [0] * 4)  # the kernel for steps of one token rounds in other places
    start = 0
    for row, length in enumerate(lengths):
        tokens = x[start : start + length].split(1)
        parts = [layer.run(token, [1], [5], [int(i > 0)], 9) for i, token in enumerate(tokens)]
        assert torch.equal(torch.cat(parts), together[start : start + length])
        assert torch.equal(layer.delta_state[5], layer.delta_state[row + 1])
        assert torch.equal(layer.conv_state[5], layer.conv_state[row + 1])
        start += length


@dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 1, 2]])
def test_a_norm_on_the_way(dtype: torch.dtype, kind: tuple[int, int, int], lengths: list[int]) -> None:
    layer = Layer(kind, dtype)
    x = layer.inputs(sum(lengths))
    z = torch.randn(len(x), layer.heads * layer.dim + 3).to(dtype)[:, 3:]
    norm = GatedNorm(put(z), put(torch.randn(layer.dim).to(dtype)), 1e-6)
    plain = layer.run(x, lengths, [1, -1, 3], [0] * 3)
    expected = KERNELS.linear_attention.gated_rms_norm(put(plain), *norm, None).cpu().float()
    got = layer.run(x, lengths, [1, -1, 3], [0] * 3, norm=norm).float()
    assert torch.allclose(got, expected, rtol=2.0**-6 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)


@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_has_the_same_bits_in_any_batch(dtype: torch.dtype, kind: tuple[int, int, int]) -> None:
    layer = Layer(kind, dtype)
    before = torch.randn(layer.conv_state.shape).to(dtype), torch.randn(layer.delta_state.shape)
    x = layer.inputs(6)
    expected: list[Tensor] = []
    for rows in ([[i] for i in range(6)], [list(range(6))], [[5, 0], [3, 1, 2], [4]]):
        layer.conv_state.copy_(before[0])
        layer.delta_state.copy_(before[1])
        out = torch.empty(6, layer.heads * layer.dim, dtype=dtype)
        for taken in rows:
            out[taken] = layer.run(x[taken], [1] * len(taken), [i + 1 for i in taken], [1] * len(taken))
        results = [out, layer.conv_state.cpu(), layer.delta_state.cpu()]
        assert all(map(torch.equal, results, expected or results))
        expected = results


@dtypes
def test_extreme_gates_stay_finite(dtype: torch.dtype) -> None:
    layer = Layer(KINDS[0], dtype)
    layer.a_log, layer.dt_bias = torch.tensor([6.0, -20.0]), torch.tensor([80.0, -90.0])
    layer.on_device[1:] = [put(layer.a_log), put(layer.dt_bias)]
    x = layer.inputs(12)
    x[:, layer.channels :] *= 60
    x[3:6, : layer.channels] = 0
    close(layer.run(x, [12], [1], [0]), Row(layer).feed(x))
