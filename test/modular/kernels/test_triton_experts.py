"""Triton's mixture of experts against the reference, whatever the experts have to do."""

import pytest
import torch
from support.triton_device import DTYPES, KERNELS, ON_DEVICE, put

from mstar.kernels import reference_experts
from mstar.kernels.packed import PackedExperts

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZES = [(4, 64, 48), (60, 200, 100), (128, 256, 192)] if ON_DEVICE else [(4, 64, 48), (5, 70, 33)]
"""(experts, hidden, width)"""
TOKENS = [0, 1, 3, 33, 300] if ON_DEVICE else [0, 1, 35]


def pack(weight: torch.Tensor) -> PackedExperts:
    return PackedExperts(weight, *weight.shape, weight.dtype, 0)


@dtypes
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize(("experts", "hidden", "width"), SIZES)
def test_weighted_sum_of_experts(dtype: torch.dtype, experts: int, hidden: int, width: int, plus: bool) -> None:
    gate_up = (torch.randn(experts, 2 * width, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, width) * width**-0.5).to(dtype)
    on_device = pack(put(gate_up)), pack(put(down))
    for tokens in TOKENS:
        x, added = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
        ids = torch.rand(tokens, experts).argsort(1)[:, :3].int().contiguous()
        ids[tokens // 2 :, 0] = ids[tokens // 2 :, 1].roll(1)  # some experts have many, some none
        weights = torch.rand(tokens, 3)
        expected = reference_experts.moe_mlp(x, ids, weights, pack(gate_up), pack(down), added if plus else None)
        device = put(added)
        got = KERNELS.experts.moe_mlp(
            put(x), put(ids), put(weights), *on_device, device if plus else None, device if plus else None
        )
        assert got is not NotImplemented and (got is device) is plus
        rounding = 2.0**-6 if dtype is torch.bfloat16 else 1e-4
        assert torch.allclose(got.cpu().float(), expected.float(), rtol=rounding, atol=rounding)


@dtypes
@pytest.mark.skipif(not ON_DEVICE, reason="the interpreter multiplies with a library whose bits depend on the batch")
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    experts, hidden, width = SIZES[0]
    weights = (
        pack(put(torch.randn(experts, 2 * width, hidden).to(dtype))),
        pack(put(torch.randn(experts, hidden, width).to(dtype))),
    )
    x, ids, share = (
        put(torch.randn(40, hidden).to(dtype)),
        put(torch.randint(0, experts, (40, 2)).int()),
        put(torch.rand(40, 2)),
    )
    whole = KERNELS.experts.moe_mlp(x, ids, share, *weights, None, None)
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        assert torch.equal(KERNELS.experts.moe_mlp(x[one], ids[one], share[one], *weights, None, None), whole[one])
