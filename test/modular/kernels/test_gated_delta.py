"""The gated delta rule over rows' states: against its formulas, against the published implementation, and its promises
about slots, batches and cuts."""

import itertools
from typing import NamedTuple

import pytest
import torch
from support.gated_delta import NAN, PAST, DeltaLayer, DeltaRow, Kind, check_close
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5 as published

from mstar.kernels import ops, reference_gated_delta

KINDS = [
    Kind(2, 2, 16, 16), Kind(2, 4, 8, 24), Kind(1, 3, 40, 7), Kind(1, 1, 128, 128), Kind(1, 2, 5, 80),
]  # fmt: skip


class Layer(DeltaLayer):
    def run(
        self, x: Tensor, lengths: list[int], slots: list[int], known: list[int], out: Tensor | None = None
    ) -> Tensor:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return ops.gated_delta(
            *self.columns(x), self.conv_weight, self.a_log, self.dt_bias, self.conv_state, self.delta_state,
            torch.tensor(slots, dtype=torch.int32), torch.tensor(known, dtype=torch.int32), starts, self.key_heads, out,
        )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_length_go_on_from_their_states(kernels: str, dtype: torch.dtype, kind: Kind) -> None:
    layer = Layer(kind, dtype)
    lengths, slots = [1, 70, 2, 0, 5, 1], [4, 1, 7, 3, 2, 8]
    rows = [DeltaRow(layer) for _ in lengths]
    for step, known in enumerate(([0] * 6, [1] * 6, [1, 0, 1, 1, 0, 1])):
        for i, kept in enumerate(known):
            if not kept:
                rows[i] = DeltaRow(layer)
        x = layer.inputs(sum(lengths) + 2)
        x[-2:] = NAN  # padding tokens
        out = torch.full((len(x), layer.width + 3), 9.0).to(dtype)
        view = out[:, : layer.width]
        assert layer.run(x, lengths, slots, known, view) is view
        assert (out[-2:] == 9).all() and (out[:, view.shape[1] :] == 9).all()
        start = 0
        for row, length, slot in zip(rows, lengths, slots, strict=True):
            if length:
                part = slice(start, start + length)
                check_close(view[part], row.feed(x[part]))
                check_close(layer.delta_state[slot], row.state)
                assert torch.equal(layer.conv_state[slot].double(), torch.stack(row.seen[-PAST:]))
            start += length
        untouched = [0, 3, 5, 6]
        assert layer.conv_state[untouched].isnan().all() and layer.delta_state[untouched].isnan().all()
        lengths = [[1, 1, 1, 0, 1, 1], [3, 65, 1, 0, 2, 130], []][step]


def test_a_row_without_a_slot_gets_zeros_and_touches_nothing(kernels: str, dtype: torch.dtype) -> None:
    layer = Layer(KINDS[0], dtype)
    x = layer.inputs(5)
    expected = DeltaRow(layer).feed(x[2:4])
    got = layer.run(x, [2, 2, 1], [-1, 3, -1], [1, 0, 0])
    assert (got[:2] == 0).all() and (got[4:] == 0).all()
    check_close(got[2:4], expected)
    assert layer.delta_state[[0, 1, 2, 4, 5, 6, 7, 8]].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_and_any_cut_give_the_same_bits(compiled: str, dtype: torch.dtype, kind: Kind) -> None:
    layer = Layer(kind, dtype)
    lengths = [90, 33, 1, 64]
    x = layer.inputs(sum(lengths))
    together = layer.run(x, lengths, [1, 2, 3, 4], [0] * 4)
    start = 0
    for row, length in enumerate(lengths):
        for cuts in ([], [length // 3], [1, 2, 3], [31, 32], [64], list(range(1, length))):
            borders = [0, *(cut for cut in cuts if cut < length), length]
            parts = []
            for first, last in itertools.pairwise(borders):
                part = x[start + first : start + last]
                parts.append(layer.run(part, [last - first], [5], [int(first > 0)]))
            assert torch.equal(torch.cat(parts), together[start : start + length])
            assert torch.equal(layer.delta_state[5], layer.delta_state[row + 1])
            assert torch.equal(layer.conv_state[5], layer.conv_state[row + 1])
        start += length


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(compiled: str, threads: int) -> None:
    layer = Layer(Kind(1, 2, 64, 160), torch.float32)
    x = layer.inputs(300)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = layer.run(x, [299, 1], [1, 2], [0, 0])
    finally:
        torch.set_num_threads(1)
    expected = layer.run(x, [299, 1], [3, 4], [0, 0])
    torch.set_num_threads(before)
    assert torch.equal(got, expected) and torch.equal(layer.delta_state[1:3], layer.delta_state[3:5])


class PublishedRow(NamedTuple):
    out: Tensor
    state: Tensor


def published_row(layer: Layer, x: Tensor, state: Tensor | None, history: Tensor) -> PublishedRow:
    """`history [PAST, channels]`: inputs of the convolution before `x`."""
    window = torch.cat([history, x[:, : layer.channels]]).T[None]
    mixed = published.causal_conv1d_fn(window, layer.conv_weight, activation="silu")[..., PAST:].transpose(1, 2)
    width = layer.key_heads * layer.key_dim
    q, k, v = mixed.split([width, width, mixed.shape[-1] - 2 * width], -1)
    b, a = x[None, :, layer.channels :].split([layer.heads, layer.heads, 5], -1)[:2]
    rule = published.torch_chunk_gated_delta_rule if len(x) > 1 else published.torch_recurrent_gated_delta_rule
    q, k, v = (x.unflatten(-1, (n, -1)) for x, n in ((q, layer.key_heads), (k, layer.key_heads), (v, layer.heads)))
    out, after = rule(
        q, k, v,
        g=-layer.a_log.exp() * functional.softplus(a.float() + layer.dt_bias), beta=b.sigmoid(),
        initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return PublishedRow(out[0].flatten(1), after[0])


@pytest.mark.parametrize("kind", [Kind(2, 2, 16, 16), Kind(2, 4, 32, 16)])
def test_the_published_implementation_agrees(kernels: str, kind: Kind) -> None:
    layer = Layer(kind, torch.float32)
    history, state = torch.zeros(PAST, layer.channels), None
    for length in (150, 1, 1, 64, 1):
        x = layer.inputs(length)
        expected = published_row(layer, x, state, history)
        got = layer.run(x, [length], [2], [int(state is not None)])
        assert torch.allclose(got, expected.out, rtol=1e-4, atol=1e-5)
        assert torch.allclose(layer.delta_state[2], expected.state, rtol=1e-4, atol=1e-5)
        history, state = torch.cat([history, x[:, : layer.channels]])[-PAST:], expected.state[None]


def test_chunks_compute_what_the_definition_does() -> None:
    for tokens in (1, 2, 63, 64, 65, 200):
        q, k, v = torch.randn(3, 2, 3, tokens, 16).double()
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        operands = reference_gated_delta.Operands(
            q, k, v, -torch.rand(2, 3, tokens).double() * 3, torch.rand(2, 3, tokens).double()
        )
        state = torch.randn(2, 3, 16, 16).double()
        whole, after = reference_gated_delta.token_by_token(operands, state)
        chunked, chunked_after = reference_gated_delta.in_chunks(operands, state)
        assert torch.allclose(whole, chunked, atol=1e-10) and torch.allclose(after, chunked_after, atol=1e-10)


def test_extreme_gates_stay_finite(kernels: str, dtype: torch.dtype) -> None:
    layer = Layer(KINDS[0], dtype)
    layer.a_log, layer.dt_bias = torch.tensor([6.0, -20.0]), torch.tensor([80.0, -90.0])
    x = layer.inputs(70)
    x[:, layer.channels :] *= 60
    x[3:6, : layer.channels] = 0
    check_close(layer.run(x, [70], [1], [0]), DeltaRow(layer).feed(x))


def test_impossible_slots_and_lengths_are_refused(compiled: str) -> None:
    layer = Layer(KINDS[0], torch.float32)
    x = layer.inputs(4)
    for lengths, slots in (([4], [9]), ([5], [1]), ([2, -1], [1, 2])):
        with pytest.raises(IndexError):
            layer.run(x, lengths, slots, [0] * len(slots))
    layer.delta_state = layer.delta_state[:5]
    with pytest.raises(ValueError, match="slots"):
        layer.run(x, [4], [1], [0])


def test_a_recorded_step_goes_on_from_what_the_slots_hold(compiled: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = Layer(KINDS[1], dtype)
    x, z = layer.inputs(3), torch.randn(3, layer.width).to(dtype)
    weight = torch.rand(layer.value_dim).to(dtype)
    slots, known = torch.tensor([1, 2, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    starts = torch.arange(4, dtype=torch.int32)

    def forward() -> Tensor:
        out = ops.gated_delta(
            *layer.columns(x), layer.conv_weight, layer.a_log, layer.dt_bias, layer.conv_state,
            layer.delta_state, slots, known, starts, layer.key_heads,
        )  # fmt: skip
        return ops.gated_rms_norm(out, z, weight, 1e-6, out=out)

    with torch.inference_mode():
        tape, recorded = ops.record(forward)
        rows = [DeltaRow(layer) for _ in range(3)]
        for row, token in zip(rows, x, strict=True):
            row.feed(token[None])
        known.fill_(1)
        for _ in range(3):
            x.copy_(layer.inputs(3))
            before = layer.conv_state.clone(), layer.delta_state.clone()
            tape.replay()
            replayed, after = recorded.clone(), layer.delta_state.clone()
            layer.conv_state.copy_(before[0])
            layer.delta_state.copy_(before[1])
            assert torch.equal(forward(), replayed) and torch.equal(layer.delta_state.nan_to_num(), after.nan_to_num())
            for i, row in enumerate(rows):
                row.feed(x[i : i + 1])
                check_close(layer.delta_state[i + 1], row.state)
    assert tape.num_torch_operations == 0 and tape.num_kernels == 2
