"""Triton's products of one row, and the linear maps of CUDA tensors."""

import pytest
import torch
from support import kernel_oracles as oracle
from support.triton_device import DEVICE, KERNELS, ON_DEVICE, put

from mstar.kernels import ops
from mstar.kernels.triton.products import gated_row_product, row_product

SHAPES = (
    [(1024, 3584), (8224, 1024), (70_000, 64), (33, 100), (5, 8192), (1, 1)] if ON_DEVICE else [(33, 100), (5, 8192)]
)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32] if ON_DEVICE else [FP32], ids=str)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_one_row(num_out: int, num_in: int, out_dtype: torch.dtype, bias: bool) -> None:
    x, weight = torch.randn(1, num_in).to(BF16), torch.randn(num_out, num_in).to(BF16)
    offset = torch.randn(num_out) if bias else None
    out = torch.full((1, num_out + 1), 7.0, dtype=out_dtype, device=DEVICE)
    row_product(put(x), put(weight), None if offset is None else put(offset), out[:, :num_out])
    oracle.linear(x, weight, offset, out_dtype).check(out[:, :num_out].cpu())
    assert (out[:, num_out] == 7).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_one_row_and_its_gates(num_out: int, num_in: int, bias: bool) -> None:
    x, weight = torch.randn(1, num_in).to(BF16), (torch.randn(2 * num_out, num_in) * num_in**-0.5).to(BF16)
    offset = torch.randn(2 * num_out) if bias else None
    out = torch.full((1, num_out + 1), 7.0, dtype=BF16, device=DEVICE)
    gated_row_product(put(x), put(weight), None if offset is None else put(offset), out[:, :num_out])
    gate, up = (x.double() @ weight.double().T + (0 if offset is None else offset.double())).chunk(2, 1)
    got, expected = out[:, :num_out].cpu().double(), gate * up / (1 + torch.exp(-gate))
    # Three numbers are rounded; silu is at most 1.1 times as steep as its argument. The interpreter cuts instead.
    bound = 2.0**-7 * (2 * expected.abs() + 1.1 * (gate * up).abs()) + 1e-5
    assert ((got - expected).abs() <= bound).all()
    assert (out[:, num_out] == 7).all()


@pytest.mark.skipif(not ON_DEVICE, reason="a library's product is on the device only")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 33, 129])
def test_linear_maps(rows: int, out_dtype: torch.dtype, bias: bool) -> None:
    x, weight = torch.randn(rows, 576).to(BF16), torch.randn(1536, 576).to(BF16)
    offset = torch.randn(1536).to(BF16) if bias else None
    packed = ops.pack_linear(put(weight), None if offset is None else put(offset))
    expected = oracle.linear(x, weight, offset, out_dtype)
    expected.check(ops.linear(put(x), packed, out_dtype=out_dtype).cpu())
    out = torch.empty(rows, 1536, dtype=out_dtype, device=DEVICE)
    assert ops.linear(put(x), packed, out) is out
    expected.check(out.cpu())
    assert KERNELS.linear(put(x), packed, None, out_dtype) is not NotImplemented
