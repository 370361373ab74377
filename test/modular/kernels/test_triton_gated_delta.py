"""Triton's gated delta rule against the formulas, and its promises about slots, batches and cuts."""

import pytest
import torch
from support.gated_delta import NAN, PAST, DeltaLayer, DeltaRow, Kind, check_close
from support.triton_device import DEVICE, DTYPES, KERNELS, ON_DEVICE, put
from torch import Tensor

from mstar.kernels.fused_norms import GatedNorm

SHAPES = [(2, 2, 128), (2, 4, 32), (1, 3, 16)] if ON_DEVICE else [(2, 2, 16), (1, 2, 32)]
"""(key heads, value heads, width of a head)"""
KINDS = [Kind(key_heads, heads, dim, dim) for key_heads, heads, dim in SHAPES]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Layer(DeltaLayer):
    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        super().__init__(kind, dtype, DEVICE)
        self.on_device = [put(self.conv_weight.t().contiguous()).t(), put(self.a_log), put(self.dt_bias)]

    def run(
        self,
        x: Tensor,
        lengths: list[int],
        slots: list[int],
        known: list[int],
        max_tokens: int | None = None,
        norm: GatedNorm | None = None,
    ) -> Tensor:
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
        wide = torch.full((len(x), self.width + 3), 9.0, dtype=self.dtype, device=DEVICE)
        out = wide[:, : self.width]
        result = KERNELS.linear_attention.gated_delta(
            *self.columns(put(x)), *self.on_device, self.conv_state, self.delta_state,
            torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            torch.tensor(known, dtype=torch.int32, device=DEVICE), starts, self.key_heads, out,
            max_tokens or max(lengths), norm,
        )  # fmt: skip
        assert result is not NotImplemented and (wide[:, self.width :] == 9).all()
        return out.cpu()


@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_length_go_on_from_their_states(dtype: torch.dtype, kind: Kind) -> None:
    layer = Layer(kind, dtype)
    lengths, slots = [1, 30, 2, 0, 5, 1], [4, 1, 7, 3, 2, 8]
    rows = [DeltaRow(layer) for _ in lengths]
    for step, known in enumerate(([0] * 6, [1] * 6, [1, 0, 1, 1, 0, 1])):
        for i, kept in enumerate(known):
            if not kept:
                rows[i] = DeltaRow(layer)
        x = layer.inputs(sum(lengths) + 2)
        x[-2:] = NAN  # padding tokens
        out = layer.run(x, lengths, slots, known)
        assert (out[-2:] == 9).all()
        start = 0
        for row, length, slot in zip(rows, lengths, slots, strict=True):
            if length:
                part = slice(start, start + length)
                check_close(out[part], row.feed(x[part]))
                check_close(layer.delta_state[slot].cpu(), row.state)
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
    rows = {3: DeltaRow(layer), 1: DeltaRow(layer)}
    for step in range(3):
        x = layer.inputs(2)
        out = layer.run(x, [1, 1], list(rows), [int(step > 0)] * 2)
        for i, (slot, row) in enumerate(rows.items()):
            check_close(out[i : i + 1], row.feed(x[i : i + 1]))
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
    check_close(got[2:4], DeltaRow(layer).feed(x[2:4]))
    assert layer.delta_state[[0, 1, 2, 4, 5, 6, 7, 8]].isnan().all()


@dtypes
@pytest.mark.parametrize("kind", KINDS[:2])
def test_any_batch_and_any_cut_give_the_same_bits(dtype: torch.dtype, kind: Kind) -> None:
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
def test_a_norm_on_the_way(dtype: torch.dtype, kind: Kind, lengths: list[int]) -> None:
    layer = Layer(kind, dtype)
    x = layer.inputs(sum(lengths))
    z = torch.randn(len(x), layer.width + 3).to(dtype)[:, 3:]
    norm = GatedNorm(put(z), put(torch.randn(layer.value_dim).to(dtype)), 1e-6)
    plain = layer.run(x, lengths, [1, -1, 3], [0] * 3)
    expected = KERNELS.linear_attention.gated_rms_norm(put(plain), *norm, None).cpu().float()
    got = layer.run(x, lengths, [1, -1, 3], [0] * 3, norm=norm).float()
    assert torch.allclose(got, expected, rtol=2.0**-6 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)


@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_has_the_same_bits_in_any_batch(dtype: torch.dtype, kind: Kind) -> None:
    layer = Layer(kind, dtype)
    before = torch.randn(layer.conv_state.shape).to(dtype), torch.randn(layer.delta_state.shape)
    x = layer.inputs(6)
    expected: list[Tensor] = []
    for rows in ([[i] for i in range(6)], [list(range(6))], [[5, 0], [3, 1, 2], [4]]):
        layer.conv_state.copy_(before[0])
        layer.delta_state.copy_(before[1])
        out = torch.empty(6, layer.width, dtype=dtype)
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
    check_close(layer.run(x, [12], [1], [0]), DeltaRow(layer).feed(x))
