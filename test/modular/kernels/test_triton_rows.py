"""Triton's norms, gates, look-ups, rotations and cache writes against the formulas."""

import pytest
import torch
from support import kernel_oracles as oracle
from support.triton_device import DEVICE, DTYPES, KERNELS, ON_DEVICE, around, put

from mstar.kernels import reference
from mstar.kernels.fused_norms import HeadNorms
from mstar.kernels.packed import PackedLinear
from mstar.kernels.triton.rope import rope_write_kv

WIDTHS = [1, 15, 16, 576, 1023, 1024, 5000] if ON_DEVICE else [15, 576]
TOKENS = [0, 1, 9, 33, 2050] if ON_DEVICE else [0, 1, 9]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def loose(expected: oracle.Expected) -> oracle.Expected:
    """The exponential of a device is short of some bits, the more the larger its argument."""
    return oracle.Expected(expected.value, expected.bound + expected.value.abs() * 2.0**-17)


@dtypes
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(dtype: torch.dtype, width: int, zero_centered: bool) -> None:
    weight = torch.randn(width).to(dtype)
    for tokens in TOKENS:
        x, residual = torch.randn(tokens, width).to(dtype), torch.randn(tokens, width).to(dtype)
        got = KERNELS.norm(put(x), None, put(weight), 1e-5, None, zero_centered)
        oracle.rms_norm(x, weight, 1e-5, zero_centered).check(got.cpu())
        total = (x.double() + residual.double()).to(dtype)
        device_x, device_residual = put(x), put(residual)
        assert KERNELS.norm(device_x, device_residual, put(weight), 1e-5, device_x, zero_centered) is device_x
        assert torch.equal(device_residual.cpu(), total)
        oracle.rms_norm(total, weight, 1e-5, zero_centered).check(device_x.cpu())


@dtypes
def test_a_norm_of_heads_inside_columns_of_a_projection(dtype: torch.dtype) -> None:
    wide = torch.randn(5, 10 * 24 + 7).to(dtype)
    queries = wide[:, 7 : 7 + 6 * 24].view(5, 6, 24)
    weight = torch.randn(24).to(dtype)
    expected, device = oracle.rms_norm(queries.clone(), weight, 1e-6, True), put(queries)
    assert KERNELS.norm(device, None, put(weight), 1e-6, device, True) is device
    expected.check(device.cpu())
    after = around(device).view(5, -1)
    assert torch.equal(after[:, :7], wide[:, :7]) and torch.equal(after[:, 151:], wide[:, 151:])


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_gates(dtype: torch.dtype, width: int) -> None:
    for tokens in TOKENS:
        gate_up = (torch.randn(tokens, 2 * width) * 8).to(dtype)
        loose(oracle.silu_and_mul(gate_up)).check(KERNELS.silu_and_mul(put(gate_up), None).cpu())
        wide = torch.randn(tokens, 2 * width + 3).to(dtype) * 8
        x, gate = wide[:, :width], wide[:, width + 1 : 2 * width + 1]
        for each in (gate, gate[:, :1], torch.randn(tokens, 3)[:, 1:2]):
            device = put(x)
            assert KERNELS.sigmoid_mul(device, put(each)) is device
            loose(oracle.sigmoid_mul(x, each)).check(device.cpu())
            assert torch.equal(around(device).view(wide.shape)[:, width:], wide[:, width:])
    extreme = torch.tensor([[-300.0, 300.0, -89.0, 0.0] + [1.0] * 4]).to(dtype)
    got = KERNELS.silu_and_mul(put(extreme), None)[0].cpu()
    assert got[0].abs() < 1e-30 and got[1] == extreme[0, 1] and got[2].abs() < 1e-30 and got[3] == 0


@dtypes
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 128), (2, 7), (16, 40)])
def test_gated_norm(dtype: torch.dtype, heads: int, dim: int) -> None:
    weight = torch.randn(dim).to(dtype)
    for tokens in TOKENS:
        x, wide = torch.randn(tokens, heads * dim).to(dtype), torch.randn(tokens, heads * dim + 5).to(dtype) * 4
        z = wide[:, 3 : 3 + heads * dim]
        device, expected = put(x), loose(oracle.gated_rms_norm(x, z, weight, 1e-6))
        expected.check(KERNELS.linear_attention.gated_rms_norm(device, put(z), put(weight), 1e-6, None).cpu())
        assert KERNELS.linear_attention.gated_rms_norm(device, put(z), put(weight), 1e-6, device) is device
        expected.check(device.cpu())


@dtypes
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embedding(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    table = torch.randn(50, 1100).to(dtype)
    for tokens in TOKENS:
        ids = torch.randint(0, 50, (tokens,), dtype=ids_dtype)
        for each in (table, table[:, 3:700]):
            assert torch.equal(KERNELS.embedding(put(ids), put(each), None).cpu(), each[ids.long()])
    packed = PackedLinear(put(table), None, 50, 1100, dtype, 0)
    out = torch.full((2, 1200), 7.0, dtype=dtype, device=DEVICE)
    KERNELS.embedding(torch.tensor([49, 50], device=DEVICE), packed, out[:, :1100])
    assert torch.equal(out[0, :1100].cpu(), table[49]) and (out[1, :1100] == 0).all() and (out[:, 1100:] == 7).all()


@dtypes
@pytest.mark.parametrize("vocab", [1, 7, 4096, 4097, 50_000, 248_320] if ON_DEVICE else [1, 7, 4097])
def test_greedy(dtype: torch.dtype, vocab: int) -> None:
    for rows in (0, 1, 9):
        logits = torch.randn(rows, vocab + 3).to(dtype)[:, :vocab]
        assert torch.equal(KERNELS.greedy(put(logits), None).cpu(), reference.greedy(logits))


@dtypes
def test_greedy_among_equals_and_numbers_that_are_none(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.full((8, 5000), -3.0)
    logits[0, [17, 4500]] = 2.0
    logits[1, [4999, 4100]] = nan
    logits[2] = -inf
    logits[3, 4098] = inf
    logits[4, [3, 4097]] = torch.tensor([-0.0, 0.0])
    logits[5] = nan
    logits[6, [5, 9]] = torch.tensor([inf, -nan])
    logits[7, 4096:] = -2.0
    out = torch.empty(8, dtype=torch.int32, device=DEVICE)
    assert KERNELS.greedy(put(logits.to(dtype)), out) is out
    assert out.tolist() == [17, 4100, 0, 4098, 3, 0, 9, 4096]


def _angles(max_position: int, half: int) -> torch.Tensor:
    return torch.arange(max_position).double()[:, None] * 100.0 ** -(torch.arange(half).double() / half)


@dtypes
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("head_dim", "half"), [(2, 1), (16, 8), (64, 32), (256, 32), (33, 5), (128, 64)])
def test_rotation(dtype: torch.dtype, head_dim: int, half: int, several: bool) -> None:
    angles = _angles(50, half)
    cos, sin = put(angles.cos().float()), put(angles.sin().float())
    axes = torch.randint(0, 3, (half,), dtype=torch.int32) if several else None
    for tokens in TOKENS[:3]:
        wide = torch.randn(tokens, 7 * head_dim + 5).to(dtype)
        qkv = wide[:, 2 : 2 + 7 * head_dim]
        positions = torch.randint(0, 50, (tokens, 3) if several else (tokens,), dtype=torch.int32)
        turns = angles[positions.long()]
        if axes is not None:
            turns = turns.gather(1, axes.long()[None, None].expand(tokens, 1, half)).squeeze(1)
        device = put(qkv)
        KERNELS.rope(device, put(positions), cos, sin, 4, head_dim, None if axes is None else put(axes))
        heads, got = qkv.reshape(tokens, 7, head_dim), device.cpu().reshape(tokens, 7, head_dim)
        oracle.rotated(heads[:, :4], turns).check(got[:, :4])
        assert torch.equal(got[:, 4:], heads[:, 4:])
        assert torch.equal(around(device).view(wide.shape)[:, :2], wide[:, :2])


@dtypes
@pytest.mark.parametrize("normed", [None, False, True])
@pytest.mark.parametrize(("head_dim", "half", "page_size"), [(256, 32, 64), (128, 64, 16), (40, 16, 24)])
def test_rotation_and_cache_writes(
    dtype: torch.dtype, head_dim: int, half: int, page_size: int, normed: bool | None
) -> None:
    angles = _angles(50, half)
    cos, sin = put(angles.cos().float()), put(angles.sin().float())
    q_weight, k_weight = torch.randn(2, head_dim).to(dtype)
    for tokens in TOKENS[1:4]:
        wide = torch.randn(tokens, 10 * head_dim + 3).to(dtype)
        qkv, heads = wide[:, : 10 * head_dim], wide[:, : 10 * head_dim].reshape(tokens, 10, head_dim)
        positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
        k_pages = torch.full((5, page_size, 2, head_dim), 5.0).to(dtype)
        slots = torch.randperm(5 * page_size)[:tokens].int()
        slots[::4] = -1
        device, k_device, v_device = put(qkv), put(k_pages), put(k_pages)
        norms = None if normed is None else HeadNorms(put(q_weight), put(k_weight), 1e-6, normed)
        rope_write_kv(device, put(positions), cos, sin, put(slots), k_device, v_device, 6, None, norms)
        before = heads.clone()
        if normed is not None:
            before[:, :6] = reference.rms_norm(heads[:, :6], q_weight, 1e-6, normed)
            before[:, 6:8] = reference.rms_norm(heads[:, 6:8], k_weight, 1e-6, normed)
        got = device.cpu().reshape(tokens, 10, head_dim)
        expected = oracle.rotated(before[:, :8], angles[positions.long()])
        if normed is not None:  # a norm in between may round to the neighbouring number
            around_it = before[:, :8].double().abs().amax(-1, keepdim=True) * 2 * oracle.ROUNDING[dtype] + 1e-5
            expected = oracle.Expected(expected.value, expected.bound + around_it)
        expected.check(got[:, :8])
        assert torch.equal(got[:, 8:], heads[:, 8:])
        keep = slots >= 0
        k_cache, v_cache = k_device.cpu().flatten(0, 1), v_device.cpu().flatten(0, 1)
        assert torch.equal(k_cache[slots[keep].long()], got[keep][:, 6:8])
        assert torch.equal(v_cache[slots[keep].long()], got[keep][:, 8:])
        written = int(keep.sum())
        assert int((k_cache != 5).any(-1).any(-1).sum()) == written == int((v_cache != 5).any(-1).any(-1).sum())


@dtypes
def test_cache_writes(dtype: torch.dtype) -> None:
    qkv = torch.randn(9, 8, 24).to(dtype)
    pages = torch.zeros(3, 16, 2, 24).to(dtype)
    slots = torch.tensor([5, -1, 47, 0, 16, 17, -1, 30, 31], dtype=torch.int32)
    k_device, v_device = put(pages), put(pages)
    device = put(qkv)
    assert KERNELS.write_kv(device[:, 4:6], device[:, 6:], k_device, v_device, put(slots)) is not NotImplemented
    k_pages, v_pages = pages.clone(), pages.clone()
    reference.write_kv(qkv[:, 4:6], qkv[:, 6:], k_pages, v_pages, slots)
    assert torch.equal(k_device.cpu(), k_pages) and torch.equal(v_device.cpu(), v_pages)
