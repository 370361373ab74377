"""What comes before the chunks of a gated delta rule, against its formulas in double precision."""

import itertools

import pytest
import torch
from support.triton_device import DEVICE, DTYPES, put
from torch import Tensor
from torch.nn import functional

from mstar.kernels.triton.delta_prompt import CHUNK, PAST, prepare_chunks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_heads", "heads", "dim"), [(1, 2, 16), (2, 2, 32)])
def test_chunks_are_prepared_and_inputs_remembered(key_heads: int, heads: int, dim: int, dtype: torch.dtype):
    torch.manual_seed(0)
    lengths, known, slots = [70, 1, 2, 64, 5], [0, 1, 1, 1, 0], [3, 1, 0, 5, 2]
    channels, tokens = (2 * key_heads + heads) * dim, sum(lengths)
    wide = torch.randn(tokens, channels + 2 * heads + 3).to(dtype)
    weight, a_log, dt_bias = torch.randn(channels, 4).to(dtype), torch.randn(heads), torch.randn(heads)
    state = torch.full((6, PAST, channels), torch.nan).to(dtype)
    for slot, is_known in zip(slots, known, strict=True):
        if is_known:
            state[slot] = torch.randn(PAST, channels).to(dtype)
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    chunks = torch.tensor([[row, i] for row, n in enumerate(lengths) for i in range(-(-n // CHUNK))])
    on_device = put(state)
    moved = put(wide)
    views = (
        moved[:, :channels],
        moved[:, channels : channels + heads],
        moved[:, channels + heads : channels + 2 * heads],
    )
    got = prepare_chunks(
        *views, put(weight), put(a_log), put(dt_bias), on_device, put(torch.tensor(slots)),
        put(torch.tensor(known, dtype=torch.int32)), put(starts), put(chunks), key_heads,
    )  # fmt: skip
    eps = 1e-5 if dtype is torch.float32 else 1e-2
    for row, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        own = slice(int(starts[row]), int(starts[row + 1]))
        x = wide[own].double()
        history = state[slot].double() if known[row] else torch.zeros(PAST, channels).double()
        window = torch.cat([history, x[:, :channels]])
        mixed = functional.silu(
            torch.stack([(window[t : t + 4] * weight.double().T).sum(0) for t in range(length)])
        ).unflatten(1, (-1, dim))
        q, k, v = mixed.split([key_heads, key_heads, heads], 1)
        check(got.q[0, own], q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt(), eps)
        check(got.k[0, own], k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(), eps)
        check(got.v[0, own], v, eps)
        b, a = x[:, channels : channels + heads], x[:, channels + heads : channels + 2 * heads]
        check(got.beta[0, own], torch.sigmoid(b), 1e-5)
        decay = -a_log.double().exp() * functional.softplus(a + dt_bias.double()) / torch.log(torch.tensor(2.0))
        check(got.log2_decay[0, own], torch.cat([part.cumsum(0) for part in decay.split(CHUNK)]), 1e-4)
        assert torch.equal(on_device[slot].cpu().double(), window[-PAST:])
    assert on_device[4].isnan().all()
    assert got.q.device == DEVICE


def check(got: Tensor, expected: Tensor, eps: float) -> None:
    assert got.isfinite().all()
    assert (got.double().cpu() - expected).abs().max() <= eps * (1 + expected.abs().max())
