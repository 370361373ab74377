"""Gated attention, gated delta nets and experts against formulas written out; handles only note what they get."""

import pytest
import torch
from torch import Tensor, nn

from mstar.kernels import ops
from mstar.kernels.fused_norms import GatedNorm, HeadNorms
from mstar.layers.gated_attention import GatedAttention
from mstar.layers.gated_delta_net import GatedDeltaNet
from mstar.layers.linear import pack_weights
from mstar.layers.moe import SharedExpertMoE

GENERATOR = torch.Generator().manual_seed(8)
HIDDEN = 12


def _fill(module: nn.Module) -> dict[str, Tensor]:
    """Random parameters; returns fp64 copies by name, because packing lets go of them."""
    for parameter in module.parameters():
        parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=GENERATOR))
    return {name: parameter.detach().double() for name, parameter in module.named_parameters()}


def _x(tokens: int = 5) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=GENERATOR)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class _Attention:
    """Attention over one token: its value, for the queries' heads in groups."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.shape = (num_heads, num_kv_heads, head_dim)
        self.qkv: Tensor | None = None

    def attend(self, qkv: Tensor, rotary: object, out: Tensor | None = None, norms: HeadNorms | None = None) -> Tensor:
        assert rotary == "table" and norms is not None
        heads, kv_heads, dim = self.shape
        self.qkv = ops.norm_heads(qkv.clone(), norms, heads, kv_heads, dim)
        values = qkv[:, -kv_heads * dim :].view(-1, kv_heads, dim)
        return values.repeat_interleave(heads // kv_heads, 1).flatten(1).contiguous()


def test_gated_attention():
    layer = GatedAttention(
        1,
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        eps=1e-3,
        bias=True,
        attn_key="attn",
        pos_key="rope",
        dtype=torch.float32,
    )
    w = _fill(layer)
    pack_weights(layer)
    attention = _Attention(4, 2, 6)
    layer.attend.bind_resources(lambda key, index: {("attn", 1): attention, ("rope", 1): "table"}[key, index])
    x = _x()
    wide = x.double() @ w["qkv_gate_proj.weight"].T + w["qkv_gate_proj.bias"]
    q, k, v, gate = wide.split([24, 12, 12, 24], 1)
    q, k = (_norm(t.view(5, -1, 6), 1 + w[f"{n}_norm.weight"], 1e-3).flatten(1) for t, n in ((q, "q"), (k, "k")))
    out = layer(x)
    torch.testing.assert_close(attention.qkv.double(), torch.cat([q, k, v], 1), rtol=1e-5, atol=1e-5)
    mixed = v.view(5, 2, 6).repeat_interleave(2, 1).flatten(1) / (1 + torch.exp(-gate))
    expected = mixed @ w["o_proj.weight"].T + w["o_proj.bias"]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


class _Delta:
    def __init__(self, width: int) -> None:
        self.width = width
        self.seen: list[Tensor] = []

    def mix(
        self, qkv: Tensor, b: Tensor, a: Tensor, weights, out: Tensor | None = None, norm: GatedNorm | None = None
    ) -> Tensor:
        self.seen = [qkv.clone(), b.clone(), a.clone(), *weights]
        assert norm is not None
        return ops.gated_rms_norm(qkv[:, -self.width :].contiguous(), *norm)


def test_gated_delta_net():
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 3, "value_dim": 5, "conv_kernel": 4, "eps": 1e-3}
    layer = GatedDeltaNet(2, hidden_size=HIDDEN, **sizes, delta_key="delta", dtype=torch.float32)
    w = _fill(layer)
    pack_weights(layer)
    delta = _Delta(20)
    layer.bind_resources(lambda key, index: {("delta", 2): delta}[key, index])
    x = _x()
    qkv, gate, b, a = (x.double() @ w["in_proj.weight"].T).split([12 + 20, 20, 4, 4], 1)
    out = layer(x)
    expected_handed = [qkv, b, a, w["conv_weight"].squeeze(1), w["a_log"], w["dt_bias"]]
    for seen, expected in zip(delta.seen, expected_handed, strict=True):
        torch.testing.assert_close(seen.double(), expected, rtol=1e-5, atol=1e-5)
    normed = _norm(qkv[:, 12:].view(5, 4, 5), w["norm.weight"], 1e-3).flatten(1)
    expected = (normed * gate / (1 + torch.exp(-gate))) @ w["out_proj.weight"].T
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in layer.named_parameters()] == ["norm.weight"]
    with pytest.raises(RuntimeError, match="packed once"):
        layer.pack()


def _gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up) @ down.T


def test_the_likeliest_experts_and_the_shared_one():
    layer = SharedExpertMoE(HIDDEN, num_experts=5, num_chosen=2, expert_width=7, shared_width=9, dtype=torch.float32)
    w = _fill(layer)
    pack_weights(layer)
    assert list(layer.parameters()) == []
    x = _x(11)
    out = layer(x)
    chosen = set()
    for token, result in zip(x.double(), out, strict=True):
        scores = w["router.weight"] @ token
        likelihood = torch.softmax(scores[:5], 0)
        best = sorted(range(5), key=lambda index: -likelihood[index])[:2]
        chosen.update(best)
        total = sum(likelihood[index] for index in best)
        expected = _gated_mlp(token, w["shared_expert.gate_up_proj.weight"], w["shared_expert.down_proj.weight"])
        expected = expected / (1 + torch.exp(-scores[5]))
        for index in best:
            own = _gated_mlp(token, w["experts.gate_up_proj"][index], w["experts.down_proj"][index])
            expected = expected + likelihood[index] / total * own
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    assert len(chosen) == 5
    with pytest.raises(RuntimeError, match="packed once"):
        layer.experts.pack()
