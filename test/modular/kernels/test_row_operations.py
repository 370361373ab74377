"""Norms, gated activation, rotary embedding, cache writes and greedy choice, each token by itself."""

import pytest
import torch
from support import kernel_oracles as oracle
from transformers.models.qwen3_5 import modeling_qwen3_5

from mstar.kernels import ops

WIDTHS = [1, 15, 16, 576, 1023]
TOKENS = [0, 1, 9, 33]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(kernels: str, dtype: torch.dtype, width: int, zero_centered: bool) -> None:
    weight = torch.randn(width).to(dtype)
    for tokens in TOKENS:
        x = torch.randn(tokens, width).to(dtype)
        expected = oracle.rms_norm(x, weight, 1e-5, zero_centered)
        expected.check(ops.rms_norm(x, weight, 1e-5, zero_centered=zero_centered))
        assert ops.rms_norm(x, weight, 1e-5, out=x, zero_centered=zero_centered) is x
        expected.check(x)


def test_rms_norm_of_heads_inside_a_packed_buffer(kernels: str, dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 10 * 24).to(dtype)
    before = qkv.clone()
    weight = torch.randn(24).to(dtype)
    keys = qkv.view(5, 10, 24)[:, 6:8]
    expected = oracle.rms_norm(keys.clone(), weight, 1e-6, False)
    ops.rms_norm(keys, weight, 1e-6, out=keys)
    expected.check(keys)
    assert torch.equal(qkv[:, : 6 * 24], before[:, : 6 * 24]) and torch.equal(qkv[:, 8 * 24 :], before[:, 8 * 24 :])


def test_rms_norm_of_heads_inside_columns_of_a_projection(kernels: str, dtype: torch.dtype) -> None:
    wide = torch.randn(5, 10 * 24 + 7).to(dtype)
    before = wide.clone()
    weight = torch.randn(24).to(dtype)
    queries = wide[:, 7 : 7 + 6 * 24].view(5, 6, 24)
    expected = oracle.rms_norm(queries.clone(), weight, 1e-6, True)
    assert ops.rms_norm(queries, weight, 1e-6, out=queries, zero_centered=True) is queries
    expected.check(queries)
    assert torch.equal(wide[:, :7], before[:, :7]) and torch.equal(wide[:, 151:], before[:, 151:])


@pytest.mark.parametrize("width", WIDTHS)
def test_sigmoid_mul(kernels: str, dtype: torch.dtype, width: int) -> None:
    for tokens in TOKENS:
        wide = torch.randn(tokens, 2 * width + 3).to(dtype) * 8
        x, gate = wide[:, :width], wide[:, width + 1 : 2 * width + 1]
        for each in (gate, gate[:, :1], torch.randn(tokens, 3)[:, 1:2]):
            before = wide.clone()
            expected = oracle.sigmoid_mul(x.clone(), each)
            assert ops.sigmoid_mul(x, each) is x
            expected.check(x)
            assert torch.equal(wide[:, width:], before[:, width:])


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 128), (2, 7), (16, 40)])
def test_gated_rms_norm(kernels: str, dtype: torch.dtype, heads: int, dim: int) -> None:
    weight = torch.randn(dim).to(dtype)
    for tokens in TOKENS:
        x, wide = torch.randn(tokens, heads * dim).to(dtype), torch.randn(tokens, heads * dim + 5).to(dtype) * 4
        z = wide[:, 3 : 3 + heads * dim]
        expected = oracle.gated_rms_norm(x, z, weight, 1e-6)
        expected.check(ops.gated_rms_norm(x, z, weight, 1e-6))
        assert ops.gated_rms_norm(x, z, weight, 1e-6, out=x) is x
        expected.check(x)


def test_gated_rms_norm_is_the_published_one(kernels: str, dtype: torch.dtype) -> None:
    norm = modeling_qwen3_5.Qwen3_5RMSNormGated(32, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, z = torch.randn(2, 5, 64).to(dtype)
    with torch.inference_mode():
        expected = norm(x.view(-1, 32), z.view(-1, 32)).view(5, 64)
        got = ops.gated_rms_norm(x, z, norm.weight, 1e-6)
    assert torch.allclose(got.float(), expected.float(), rtol=2.0**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_fused_add_rms_norm(kernels: str, dtype: torch.dtype, width: int) -> None:
    weight = torch.randn(width).to(dtype)
    for tokens in TOKENS:
        x, residual = torch.randn(tokens, width).to(dtype), torch.randn(tokens, width).to(dtype)
        total = (x.double() + residual.double()).to(dtype)
        assert ops.fused_add_rms_norm(x, residual, weight, 1e-5) is x
        assert torch.equal(residual, total)
        oracle.rms_norm(total, weight, 1e-5, False).check(x)


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(kernels: str, dtype: torch.dtype, width: int) -> None:
    for tokens in TOKENS:
        gate_up = (torch.randn(tokens, 2 * width) * 8).to(dtype)
        oracle.silu_and_mul(gate_up).check(ops.silu_and_mul(gate_up))
    extreme = torch.tensor([[-300.0, 300.0, -89.0, 0.0] + [1.0] * 4]).to(dtype)
    got = ops.silu_and_mul(extreme)[0]
    assert got[0].abs() < 1e-30 and got[1] == extreme[0, 1] and got[2].abs() < 1e-30 and got[3] == 0


def _angles(max_position: int, half: int) -> torch.Tensor:
    return torch.arange(max_position).double()[:, None] * 100.0 ** -(torch.arange(half).double() / half)


@pytest.mark.parametrize(("head_dim", "half"), [(2, 1), (16, 8), (64, 32), (64, 8), (33, 5), (128, 64)])
def test_rope_turns_the_first_heads_in_place(kernels: str, dtype: torch.dtype, head_dim: int, half: int) -> None:
    angles = _angles(50, half)
    cos, sin = angles.cos().float(), angles.sin().float()
    for tokens in TOKENS:
        qkv = torch.randn(tokens, 7 * head_dim).to(dtype)
        positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
        heads = qkv.clone().view(tokens, 7, head_dim)
        assert ops.rope(qkv, positions, cos, sin, 4, head_dim) is qkv
        got = qkv.view(tokens, 7, head_dim)
        oracle.rotated(heads[:, :4], angles[positions.long()]).check(got[:, :4])
        assert torch.equal(got[:, 4:], heads[:, 4:])
    with pytest.raises(IndexError):
        ops.rope(torch.randn(1, 7 * head_dim).to(dtype), torch.tensor([50], dtype=torch.int32), cos, sin, 4, head_dim)


@pytest.mark.parametrize(("head_dim", "half"), [(16, 8), (256, 32), (33, 5)])
def test_frequencies_may_follow_several_positions(kernels: str, dtype: torch.dtype, head_dim: int, half: int) -> None:
    angles = _angles(50, half)
    cos, sin = angles.cos().float(), angles.sin().float()
    wide = torch.randn(9, (4 + 2 * 2) * head_dim + 5).to(dtype)  # the queries, keys and values of a wider projection
    qkv, before = wide[:, : 8 * head_dim], wide.clone()
    positions = torch.randint(0, 50, (9, 3), dtype=torch.int32)
    axes = torch.arange(half, dtype=torch.int32) % 3
    axes[half // 2 :] = 0
    slots = torch.arange(9, dtype=torch.int32)
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, head_dim).to(dtype)
    ops.rope_write_kv(qkv, positions, cos, sin, slots, k_pages, v_pages, 4, axes)

    heads, turned = before[:, : 8 * head_dim].view(9, 8, head_dim), torch.empty(9, half).double()
    for t in range(9):
        for i in range(half):
            turned[t, i] = angles[positions[t, axes[i]], i]
    expected = oracle.rotated(heads[:, :6], turned)
    got = qkv.view(9, 8, head_dim)
    expected.check(got[:, :6])
    assert torch.equal(wide[:, 6 * head_dim :], before[:, 6 * head_dim :])
    assert torch.equal(k_pages.flatten(0, 1)[:9], got[:, 4:6]) and torch.equal(v_pages.flatten(0, 1)[:9], got[:, 6:])
    alone = before[:, : 8 * head_dim]
    ops.rope(alone, positions, cos, sin, 6, head_dim, axes)
    assert torch.equal(alone.reshape(9, 8, head_dim)[:, :6], got[:, :6])
    same = positions[:, :1].expand(9, 3).contiguous()
    one, three = wide.clone(), wide.clone()
    ops.rope(one, same[:, 0].contiguous(), cos, sin, 6, head_dim)
    assert torch.equal(ops.rope(three, same, cos, sin, 6, head_dim, axes), one)
    for token, axis in ((8, 1), (0, 0)):
        positions[token, axis] = 50
        with pytest.raises(IndexError):
            ops.rope(wide, positions, cos, sin, 6, head_dim, axes)
        positions[token, axis] = 0


@pytest.mark.parametrize("head_dim", [16, 33, 64])
def test_keys_and_values_go_to_their_slots(kernels: str, dtype: torch.dtype, head_dim: int) -> None:
    half = head_dim // 2
    angles = _angles(50, half)
    cos, sin = angles.cos().float(), angles.sin().float()
    qkv = torch.randn(9, (4 + 2 * 2) * head_dim).to(dtype)
    heads = qkv.clone().view(9, 8, head_dim)
    positions = torch.randint(0, 50, (9,), dtype=torch.int32)
    slots = torch.tensor([0, 3, 4, 31, 17, -1, 5, -1, 8], dtype=torch.int32)
    k_pages, v_pages = torch.full((2, 8, 4, 2, head_dim), 9.0).to(dtype)
    ops.rope_write_kv(qkv, positions, cos, sin, slots, k_pages, v_pages, 4)

    expected = oracle.rotated(heads[:, :6], angles[positions.long()])
    got = qkv.view(9, 8, head_dim)
    expected.check(got[:, :6])
    assert torch.equal(got[:, 6:], heads[:, 6:])
    written = [t for t in range(9) if slots[t] >= 0]
    flat_k, flat_v = k_pages.view(32, 2, head_dim), v_pages.view(32, 2, head_dim)
    for t in written:
        assert torch.equal(flat_k[slots[t]], got[t, 4:6])
        assert torch.equal(flat_v[slots[t]], heads[t, 6:])
    untouched = sorted(set(range(32)) - {int(slots[t]) for t in written})
    assert (flat_k[untouched] == 9).all() and (flat_v[untouched] == 9).all()

    other_k, other_v = torch.full((2, 8, 4, 2, head_dim), 9.0).to(dtype)
    ops.write_kv(got[:, 4:6], got[:, 6:], other_k, other_v, slots)
    assert torch.equal(other_k, k_pages) and torch.equal(other_v, v_pages)
    with pytest.raises(IndexError):
        ops.write_kv(got[:1, 4:6], got[:1, 6:], other_k, other_v, torch.tensor([32], dtype=torch.int32))


@pytest.mark.parametrize("vocab", [1, 7, 16, 33, 1000, 49152])
def test_greedy_takes_the_lowest_index_of_the_largest(kernels: str, dtype: torch.dtype, vocab: int) -> None:
    for rows in (1, 4, 33):
        logits = torch.randint(-3, 4, (rows, vocab)).to(dtype)  # many ties
        expected = [row.index(max(row)) for row in logits.tolist()]
        got = ops.greedy(logits)
        assert got.dtype == torch.int32 and got.tolist() == expected
    logits = torch.full((2, vocab), float("-inf")).to(dtype)
    assert ops.greedy(logits).tolist() == [0, 0]
    logits[1, vocab // 2 :] = float("nan")
    logits[1, 0] = 5 if vocab > 1 else float("nan")
    out = torch.empty(2, dtype=torch.int32)
    assert ops.greedy(logits, out=out) is out and out.tolist() == [0, vocab // 2]


def test_a_token_has_the_same_bits_in_any_batch(compiled: str, dtype: torch.dtype) -> None:
    weight, gate_up, residual = (
        torch.randn(576).to(dtype),
        torch.randn(70, 1152).to(dtype),
        torch.randn(70, 576).to(dtype),
    )
    x = torch.randn(70, 576).to(dtype)
    angles = _angles(80, 32)
    tables = angles.cos().float(), angles.sin().float()

    def everything(rows: slice) -> list[torch.Tensor]:
        added, total, qkv = x[rows].clone(), residual[rows].clone(), x[rows].clone()
        ops.fused_add_rms_norm(added, total, weight, 1e-5)
        ops.rope(qkv, torch.arange(80, dtype=torch.int32)[rows].contiguous(), *tables, 9, 64)
        gated = ops.sigmoid_mul(x[rows].clone(), residual[rows])
        normed = ops.gated_rms_norm(x[rows], residual[rows], weight[:64].contiguous(), 1e-5)
        return [ops.rms_norm(x[rows], weight, 1e-5), added, total, qkv, ops.silu_and_mul(gate_up[rows]), gated, normed]

    together = everything(slice(0, 70))
    for i in range(70):
        for alone, batched in zip(everything(slice(i, i + 1)), together, strict=True):
            assert torch.equal(alone[0], batched[i])
