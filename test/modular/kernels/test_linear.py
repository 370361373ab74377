"""Products with packed weights, and embedding from them."""

import pytest
import torch
from support import kernel_oracles as oracle

from mstar.kernels import ops

SHAPES = [(1, 1), (17, 3), (64, 64), (100, 33), (192, 576), (70, 3205)]  # (outputs, inputs)
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_over_row_counts(kernels: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    plain, biased = ops.pack_linear(weight), ops.pack_linear(weight, bias)
    x = torch.randn(33, shape[1]).to(dtype)
    expected, expected_biased = oracle.linear(x, weight, None, dtype), oracle.linear(x, weight, bias, dtype)
    for rows in ROWS:
        expected.first(rows).check(ops.linear(x[:rows], plain))
        expected_biased.first(rows).check(ops.linear(x[:rows], biased))


def test_output_may_be_wider_a_view_or_have_leading_dimensions(kernels: str) -> None:
    weight = torch.randn(40, 24).bfloat16()
    packed = ops.pack_linear(weight)
    x = torch.randn(6, 24).bfloat16()
    logits = ops.linear(x, packed, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    oracle.linear(x, weight, None, torch.float32).check(logits)

    wide = torch.full((6, 60), 5.0, dtype=torch.bfloat16)
    assert ops.linear(x, packed, out=wide[:, 10:50]).data_ptr() == wide[:, 10:50].data_ptr()
    oracle.linear(x, weight, None, torch.bfloat16).check(wide[:, 10:50])
    assert (wide[:, :10] == 5).all() and (wide[:, 50:] == 5).all()

    strided = torch.randn(6, 48).bfloat16()[:, ::2]
    oracle.linear(strided, weight, None, torch.bfloat16).check(ops.linear(strided, packed))
    assert ops.linear(x.view(2, 3, 24), packed).shape == (2, 3, 40)
    assert ops.linear(x[:0], packed).shape == (0, 40)


def test_wrong_shapes_and_dtypes_are_refused(kernels: str) -> None:
    packed = ops.pack_linear(torch.randn(8, 4))
    with pytest.raises((ValueError, RuntimeError)):
        ops.linear(torch.randn(2, 5), packed)
    with pytest.raises((ValueError, RuntimeError)):
        ops.linear(torch.randn(2, 4).bfloat16(), packed)
    with pytest.raises((ValueError, RuntimeError)):
        ops.linear(torch.randn(2, 4), packed, out=torch.empty(2, 9))
    with pytest.raises(ValueError, match="2 dimensions"):
        ops.pack_linear(torch.randn(8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    compiled: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    packed = ops.pack_linear(torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype))
    x = torch.randn(130, shape[1]).to(dtype)
    alone = torch.cat([ops.linear(x[i : i + 1], packed) for i in range(130)])
    for rows in (*ROWS, 130):
        assert torch.equal(ops.linear(x[:rows], packed), alone[:rows]), rows
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.linear(x, packed), alone)
        torch.set_num_threads(7)
        assert torch.equal(ops.linear(x, packed), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_weights_unpack_and_serve_as_an_embedding(
    kernels: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = ops.pack_linear(weight.clone())
    assert torch.equal(packed.matrix(), weight)
    ids = torch.randint(0, shape[0], (11,))
    for each in (ids, ids.int()):
        assert torch.equal(ops.embedding(each, packed), weight[ids])
        assert torch.equal(ops.embedding(each, weight), weight[ids])
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([shape[0]]), packed)
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([shape[0]], dtype=torch.int32), weight)


def test_weights_outlive_a_change_of_kernels(compiled: str) -> None:
    weight = torch.randn(20, 30)
    packed = ops.pack_linear(weight)
    ops.use_kernels(None)
    x = torch.randn(3, 30)
    oracle.linear(x, weight, None, torch.float32).check(ops.linear(x, packed))


def test_half_precision_goes_to_torch(kernels: str) -> None:
    weight = torch.randn(20, 30).half()
    x = torch.randn(3, 30).half()
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), torch.nn.functional.linear(x, weight))
