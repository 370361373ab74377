"""Attention and linear attention backends on an accelerator, over shapes, against the references in fp32."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.engine.layer_handles import GatedDeltaWeights
from mstar.engine.resources.attention_backends import AttentionMeta, AttentionNeed, HostRows
from mstar.engine.resources.attention_choice import choose_backend
from mstar.engine.resources.linear_attention_backends import LayerStates, LinearAttentionMeta, LinearAttentionNeed
from mstar.engine.resources.linear_attention_choice import choose_backend as choose_linear_backend
from mstar.engine.resources.paged_kv import LayerPages
from mstar.kernels import reference, reference_gated_delta

PAGE = 64
STEPS = {
    "one prompt": ([(130, 130)], 3),
    "prompts": ([(1, 1), (64, 64), (65, 65), (300, 300)], 0),
    "decode beside chunks": ([(1, 700), (1, 64), (1, 65), (128, 320), (7, 7)], 0),
    "decode": ([(1, 1), (1, 63), (1, 64), (1, 65), (1, 1000), (1, 129)], 0),
}
"""Tokens and keys of each row."""


def error(got: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.float().cpu() - expected.float().cpu()).norm() / expected.float().norm().cpu())


def starts_of(spans: list[int]) -> np.ndarray:
    return np.cumsum([0, *spans]).astype(np.int32)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 2, 256)])
@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_attention_is_the_references(name: str, heads: int, kv_heads: int, dim: int, step: str):
    torch.manual_seed(0)
    rows, _ = STEPS[step]
    spans, lens = [span for span, _ in rows], [keys for _, keys in rows]
    counts = [-(-keys // PAGE) for keys in lens]
    free = (torch.randperm(sum(counts)) + 1).tolist()
    table = np.zeros((len(rows), max(counts)), np.int32)
    for row, count in enumerate(counts):
        table[row, :count] = [free.pop() for _ in range(count)]
    shape = (sum(counts) + 1, PAGE, kv_heads, dim)
    pages = LayerPages(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16())
    wide = torch.randn(sum(spans), (heads + 2 * kv_heads) * dim).bfloat16()
    starts, kv_lens = starts_of(spans), np.array(lens, np.int32)
    q = wide.view(sum(spans), -1, dim)[:, :heads]
    expected = torch.empty(q.shape)
    columns = [torch.from_numpy(column) for column in (table, kv_lens, starts)]
    reference.paged_attend(q.float(), pages.k.float(), pages.v.float(), *columns, dim**-0.5, True, expected)
    device = torch.device("cuda", 0)
    need = AttentionNeed("cuda", torch.bfloat16, heads, kv_heads, dim, PAGE)
    backend = choose_backend("attn", need, name, device)
    on_device = LayerPages(pages.k.to(device), pages.v.to(device))
    moved = [column.to(device) for column in columns]
    host = HostRows(table, kv_lens, starts, all(span == 1 for span in spans))
    meta = AttentionMeta(*moved, torch.zeros(0, dtype=torch.int32, device=device), dim**-0.5, True, True, host, True)
    moved_q = wide.to(device).view(sum(spans), -1, dim)[:, :heads]
    for _ in range(3):  # wrappers take turns
        out = torch.full(q.shape, torch.nan, dtype=torch.bfloat16, device=device)
        backend.plan(meta)
        backend.attend(moved_q, on_device, meta, out)
        assert error(out, expected) < 6e-3


KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, KERNEL = 4, 8, 128, 128, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM


class Linear:
    """One layer of gated delta rule: states of 6 slots, all NaN but those that `step` is told are known."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        conv = torch.randn(CHANNELS, KERNEL, generator=generator) * 0.5
        a_log, bias = torch.randn(HEADS, generator=generator), torch.randn(HEADS, generator=generator) - 3
        self.weights = GatedDeltaWeights(conv.bfloat16(), a_log, bias)
        self.states = LayerStates(
            torch.full((6, KERNEL - 1, CHANNELS), torch.nan).bfloat16(),
            torch.full((6, HEADS, KEY_DIM, VALUE_DIM), torch.nan),
        )

    def step(self, name: str, x: Tensor, spans: list[int], slots: list[int], known: list[int]) -> Tensor:
        """`x [tokens, channels + 2 heads]`; by the backend on the accelerator, or by the reference on the CPU."""
        device = torch.device("cpu" if name == "reference" else "cuda")
        x = x.to(device)
        self.weights = GatedDeltaWeights(*(each.to(device) for each in self.weights))
        self.states = LayerStates(*(each.to(device) for each in self.states))
        qkv, b, a = x.split([CHANNELS, HEADS, HEADS], 1)
        columns = [torch.tensor(column, dtype=torch.int32, device=device) for column in (slots, known)]
        starts = torch.from_numpy(starts_of(spans)).to(device)
        out = torch.full((x.shape[0], HEADS * VALUE_DIM), torch.nan, dtype=x.dtype, device=device)
        if name == "reference":
            reference_gated_delta.gated_delta(qkv, b, a, *self.weights, *self.states, *columns, starts, KEY_HEADS, out)
            return out
        need = LinearAttentionNeed("cuda", torch.bfloat16, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, KERNEL)
        backend = choose_linear_backend("delta", need, name)
        single = all(span == 1 for span in spans)
        meta = backend.begin(LinearAttentionMeta(*columns, starts, single), x.shape[0])
        backend.mix(qkv, b, a, self.weights, self.states, KEY_HEADS, meta, out)
        return out


def inputs(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, CHANNELS + 2 * HEADS, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("name", ["fla", "triton"])
def test_linear_attention_is_the_references(name: str):
    """Prompts that begin, chunks that go on (some shorter than the convolution), and tokens beside them."""
    steps = [([200, 2, 64, 1], [3, 1, 5, 2], [0, 0, 0, 0]), ([1, 1, 130, 2], [3, 1, 2, 5], [1, 1, 1, 1]),
             ([1, 1, 1], [5, 2, 1], [1, 1, 1])]  # fmt: skip
    expected, got = Linear(), Linear()
    for seed, (spans, slots, known) in enumerate(steps):
        x = inputs(sum(spans), seed)
        one, other = expected.step("reference", x, spans, slots, known), got.step(name, x, spans, slots, known)
        assert error(other, one) < 1.5e-2, seed
        for conv, plain in zip(got.states.conv[slots].cpu(), expected.states.conv[slots], strict=True):
            assert torch.equal(conv, plain)
        assert error(got.states.delta[slots], expected.states.delta[slots]) < 1.5e-2
    assert got.states.delta[4].isnan().all() and got.states.conv[4].isnan().all()  # slot 0 is nobody's


@pytest.mark.parametrize("cuts", [(64,), (256,), (64, 192), (64, 128, 192, 256, 320)])
@pytest.mark.parametrize("tokens", [320, 333])
@pytest.mark.parametrize("name", ["fla", "triton"])
def test_cuts_on_multiples_of_the_chunk_change_no_bit(name: str, tokens: int, cuts: tuple[int, ...]):
    x = inputs(tokens)
    whole, cut = Linear(), Linear()
    at_once = whole.step(name, x, [tokens], [2], [0])
    borders = [0, *(at for at in cuts if at < tokens), tokens]
    pieces = [cut.step(name, x[begin:end], [end - begin], [2], [int(begin > 0)]) for begin, end in pairwise(borders)]
    assert torch.equal(at_once, torch.cat(pieces))
    assert torch.equal(whole.states.delta[2], cut.states.delta[2])
    assert torch.equal(whole.states.conv[2], cut.states.conv[2])


def test_a_rows_result_does_not_depend_on_its_neighbours():
    x, other = inputs(100, 1), inputs(70, 2)
    alone, beside = Linear(), Linear()
    one = alone.step("fla", x, [100], [1], [0])
    both = beside.step("fla", torch.cat([other, x]), [70, 100], [3, 1], [0, 0])
    assert torch.equal(one, both[70:])
    assert torch.equal(alone.states.delta[1], beside.states.delta[1])
