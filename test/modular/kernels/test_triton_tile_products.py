"""Triton's products by tiles: against exact products, and a row's bits beside others."""

import pytest
import torch
from support import kernel_oracles as oracle
from support.triton_device import DEVICE, ON_DEVICE, put
from torch import Tensor

from mstar.kernels.triton import tile_products
from mstar.kernels.triton.rows import sum_and_norm
from mstar.kernels.triton.tile_products import gated_tile_product, product_parts, tile_product

SHAPES = [(1024, 3584), (8224, 1024), (100, 1032), (33, 520)] if ON_DEVICE else [(70, 72), (40, 1032)]
ROWS = [2, 8, 32, 33, 100, 128] if ON_DEVICE else [2, 33]
DTYPE = torch.bfloat16 if ON_DEVICE else torch.float32
"""Tensor cores multiply bf16; the interpreter does that wrongly."""


def _inputs(rows: int, num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
    """Rows of a wider buffer whose other columns are NaN, and weights."""
    wide = torch.full((rows, num_in + 16), float("nan")).to(DTYPE)
    wide[:, :num_in] = torch.randn(rows, num_in).to(DTYPE)
    return wide[:, :num_in], (torch.randn(num_out, num_in) * num_in**-0.5).to(DTYPE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_products(num_out: int, num_in: int, rows: int) -> None:
    x, weight = _inputs(rows, num_out, num_in)
    wide = torch.full((rows, num_out + 1), 7.0, dtype=DTYPE, device=DEVICE)
    tile_product(put(x), put(weight), wide[:, :num_out])
    oracle.linear(x, weight, None, DTYPE).check(wide[:, :num_out].cpu())
    assert (wide[:, num_out] == 7).all()
    parts = product_parts(put(x), put(weight))
    assert parts.dtype is torch.float32
    oracle.linear(x, weight, None, torch.float32).check(parts.sum(0).cpu())


@pytest.mark.parametrize("rows", ROWS)
def test_gates_of_a_product(rows: int) -> None:
    num_out, num_in = (3584, 1024) if ON_DEVICE else (40, 72)
    x, weight = _inputs(rows, 2 * num_out, num_in)
    wide = torch.full((rows, num_out + 1), 7.0, dtype=DTYPE, device=DEVICE)
    gated_tile_product(put(x), put(weight), wide[:, :num_out])
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    got, expected = wide[:, :num_out].cpu().double(), gate * up / (1 + torch.exp(-gate))
    # Three numbers are rounded; silu is at most 1.1 times as steep as its argument.
    ulp = 2.0**-7 if DTYPE is torch.bfloat16 else 2.0**-16
    assert ((got - expected).abs() <= ulp * (2 * expected.abs() + 1.1 * (gate * up).abs()) + 1e-5).all()
    assert (wide[:, num_out] == 7).all()


@pytest.mark.skipif(not ON_DEVICE, reason="interpreted, a dot is a product of NumPy's, whose bits depend on its shape")
@pytest.mark.parametrize("many", [False, True])
def test_a_row_has_the_same_bits_beside_any_others(many: bool) -> None:
    num_out, num_in = 1024, 2048
    most = tile_products.MOST_ROWS if many else tile_products.FEW_ROWS
    least = tile_products.FEW_ROWS + 1 if many else 2
    x, weight = _inputs(most, num_out, num_in)
    whole = product_parts(put(x), put(weight))
    some = product_parts(put(x[-least:]), put(weight))
    assert torch.equal(whole[:, -least:], some)
    outs = [torch.empty(rows, num_out, dtype=DTYPE, device=DEVICE) for rows in (most, least)]
    tile_product(put(x), put(weight), outs[0])
    tile_product(put(x[-least:]), put(weight), outs[1])
    assert torch.equal(outs[0][-least:], outs[1])


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_norm_of_a_sum(num_parts: int, zero_centered: bool) -> None:
    parts = torch.randn(num_parts, 5, 72)
    residual, weight = torch.randn(5, 72).to(DTYPE), torch.randn(72).to(DTYPE)
    on_device = put(residual)
    result = sum_and_norm(put(parts), on_device, put(weight), 1e-6, zero_centered)
    summed = parts[0].clone()
    for part in parts[1:]:
        summed += part
    stream = (residual.float() + summed.to(DTYPE).float()).to(DTYPE)
    assert torch.equal(on_device.cpu(), stream)
    oracle.rms_norm(stream, weight, 1e-6, zero_centered).check(result.cpu())
