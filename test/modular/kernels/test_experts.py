"""Mixture of experts: choosing, and the weighted sum of the chosen ones' MLPs."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as published
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from mstar.kernels import ops


class Experts:
    def __init__(self, experts: int, hidden: int, width: int, dtype: torch.dtype) -> None:
        self.gate_up = torch.randn(experts, 2 * width, hidden).to(dtype) * hidden**-0.5
        self.down = torch.randn(experts, hidden, width).to(dtype) * width**-0.5
        self.packed = ops.pack_experts(self.gate_up), ops.pack_experts(self.down)

    def run(
        self, x: Tensor, ids: Tensor, weights: Tensor, plus: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return ops.moe_mlp(x, ids, weights, *self.packed, plus=plus, out=out)

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        chosen = ids.long()
        gate, up = torch.einsum("tkwh,th->tkw", self.gate_up[chosen].double(), x.double()).chunk(2, -1)
        hidden = functional.silu(gate) * up
        return torch.einsum("tk,tkhw,tkw->th", weights.double(), self.down[chosen].double(), hidden)


def routes(tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]) if tokens else torch.zeros(0, k)
    return ids.int(), torch.rand(tokens, k)


def check(got: Tensor, expected: Tensor) -> None:
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[got.dtype]
    assert torch.isfinite(got).all() and (got.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize(
    ("experts", "hidden", "width", "k"), [(8, 64, 32, 2), (5, 33, 17, 3), (16, 128, 48, 8), (1, 16, 16, 1)]
)
def test_tokens_get_the_weighted_sum_of_their_experts(
    kernels: str, dtype: torch.dtype, experts: int, hidden: int, width: int, k: int
) -> None:
    layer = Experts(experts, hidden, width, dtype)
    for tokens in (1, 3, 40):
        x = torch.randn(tokens, hidden).to(dtype)
        ids, weights = routes(tokens, experts, k)
        expected = layer.expected(x, ids, weights)
        check(layer.run(x, ids, weights), expected)
        plus = torch.randn(tokens, hidden).to(dtype)
        expected = expected + plus.double()
        wide = torch.full((tokens, hidden + 3), 9.0).to(dtype)
        out = wide[:, :hidden]
        assert layer.run(x, ids, weights, plus, out) is out
        check(out, expected)
        assert (wide[:, hidden:] == 9).all()
        assert layer.run(x, ids, weights, plus, plus) is plus
        assert torch.equal(plus, out)
    assert layer.run(x[:0], *routes(0, experts, k)).shape == (0, hidden)


def test_all_tokens_at_one_expert(kernels: str, dtype: torch.dtype) -> None:
    layer = Experts(4, 32, 16, dtype)
    x, weights = torch.randn(40, 32).to(dtype), torch.rand(40, 1)
    ids = torch.full((40, 1), 2, dtype=torch.int32)
    check(layer.run(x, ids, weights), layer.expected(x, ids, weights))


def test_a_token_has_the_same_bits_in_any_batch(compiled: str, dtype: torch.dtype) -> None:
    layer = Experts(6, 64, 32, dtype)
    x = torch.randn(50, 64).to(dtype)
    ids, weights = routes(50, 6, 3)
    together = layer.run(x, ids, weights)
    for i in range(50):
        assert torch.equal(layer.run(x[i : i + 1], ids[i : i + 1], weights[i : i + 1])[0], together[i])
    half = [layer.run(x[s], ids[s], weights[s]) for s in (slice(0, 17), slice(17, 50))]
    assert torch.equal(torch.cat(half), together)


def test_experts_that_do_not_exist_are_refused(compiled: str) -> None:
    layer = Experts(4, 16, 16, torch.float32)
    for expert in (4, -1):
        with pytest.raises(IndexError, match="expert"):
            layer.run(torch.randn(1, 16), torch.tensor([[0, expert]], dtype=torch.int32), torch.ones(1, 2))


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (7, 3), (16, 16), (256, 8), (60, 4)])
def test_the_likeliest_are_chosen_the_lowest_first_among_equals(kernels: str, experts: int, k: int) -> None:
    logits = torch.randint(-6, 6, (40, experts)).float() / 3  # many ties
    ids, weights = ops.router_top_k(logits, k)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    for row, chosen, weight in zip(logits.double(), ids.tolist(), weights.double(), strict=True):
        order = sorted(range(experts), key=lambda i: (-row[i], i))[:k]
        assert chosen == order
        expected = torch.softmax(row, 0)[order]
        assert torch.allclose(weight, expected / expected.sum(), rtol=1e-5)


def test_extreme_and_broken_logits_give_experts_that_exist(kernels: str) -> None:
    logits = torch.full((4, 10), float("-inf"))
    logits[0, 3] = 0
    logits[1] = 1e30
    logits[2] = torch.randn(10)
    logits[2, 5] = float("nan")
    logits[3] = float("nan")
    ids, weights = ops.router_top_k(logits, 3)
    assert all(sorted(set(row)) == sorted(row) and min(row) >= 0 and max(row) < 10 for row in ids.tolist())
    assert weights[0].tolist() == [1, 0, 0] and ids[0, 0] == 3
    assert ids[1].tolist() == [0, 1, 2] and torch.allclose(weights[1], torch.tensor(1 / 3))
    assert weights[2:].isnan().all()


def test_the_published_block_agrees(kernels: str) -> None:
    config = Qwen3_5MoeTextConfig(
        hidden_size=64,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=16,
    )
    block = published.Qwen3_5MoeSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(1, 37, 64)
    with torch.inference_mode():
        expected = block(x)[0]
        logits, scores, chosen = block.gate(x)
        ids, weights = ops.router_top_k(logits, 3)
        assert torch.equal(ids.long(), chosen) and torch.allclose(weights, scores, atol=1e-6)
        shared = ops.sigmoid_mul(block.shared_expert(x[0]), block.shared_expert_gate(x[0]))
        gate_up, down = ops.pack_experts(block.experts.gate_up_proj), ops.pack_experts(block.experts.down_proj)
        got = ops.moe_mlp(x[0], ids, weights, gate_up, down, plus=shared)
    assert torch.allclose(got, expected, atol=1e-5, rtol=1e-4)


def test_a_recorded_block_follows_its_router(compiled: str, dtype: torch.dtype) -> None:
    layer = Experts(8, 32, 16, dtype)
    router = ops.pack_linear(torch.randn(8, 32).to(dtype))
    x = torch.randn(9, 32).to(dtype)

    def forward() -> Tensor:
        return layer.run(x, *ops.router_top_k(ops.linear(x, router, out_dtype=torch.float32), 2))

    with torch.inference_mode():
        tape, recorded = ops.record(forward)
        for _ in range(3):
            x.normal_()
            tape.replay()
            assert torch.equal(recorded, forward())
    assert tape.num_torch_operations == 0 and tape.num_kernels == 3
