"""Layers against formulas written out in plain torch, and how they get hold of resources."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.engine.layer_handles import bind_layers
from mstar.kernels import ops
from mstar.layers.attention import PagedAttention, SelfAttention
from mstar.layers.embedding import OutputHead, TiedEmbedding, TokenEmbedding
from mstar.layers.linear import Linear, pack_weights
from mstar.layers.mlp import GatedMLP
from mstar.layers.norm import RMSNorm
from mstar.layers.sampling import Sampler

GENERATOR = torch.Generator().manual_seed(5)


def _fill(module: nn.Module) -> dict[str, Tensor]:
    """Random parameters; returns copies by name, because packing lets go of them."""
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=GENERATOR))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(bias: bool, dtype: torch.dtype):
    layer = Linear(24, 40, bias=bias, dtype=dtype)
    values = _fill(layer)
    pack_weights(layer)
    x = torch.randn(7, 24, generator=GENERATOR).to(dtype)
    expected = functional.linear(x.double(), values["weight"].double())
    if bias:
        expected = expected + values["bias"].double()
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x).double(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)


def test_weights_are_held_once_and_packed_once():
    layer = nn.Sequential(Linear(8, 8, dtype=torch.float32), Linear(8, 8, bias=True, dtype=torch.float32))
    _fill(layer)
    pack_weights(layer)
    assert list(layer.parameters()) == []
    with pytest.raises(RuntimeError, match="packed once"):
        pack_weights(layer)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_alone_and_with_the_residual(zero_centered: bool):
    norm = RMSNorm(32, 1e-3, zero_centered=zero_centered, dtype=torch.float32)
    weight = _fill(norm)["weight"] + (1.0 if zero_centered else 0.0)
    x, residual = torch.randn(5, 32, generator=GENERATOR), torch.randn(5, 32, generator=GENERATOR)

    def formula(value: Tensor) -> Tensor:
        return value / (value.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    torch.testing.assert_close(norm(x), formula(x))
    total = x + residual
    result = ops.fused_add_rms_norm(x, *norm.onto(residual))
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(result, formula(total))
    assert result.data_ptr() == x.data_ptr()


def test_a_map_may_bring_the_norm_after_it():
    linear, norm = Linear(20, 32, dtype=torch.float32), RMSNorm(32, 1e-3, dtype=torch.float32)
    weight, scale = _fill(linear)["weight"], _fill(norm)["weight"]
    pack_weights(linear)
    x, residual = torch.randn(3, 20, generator=GENERATOR), torch.randn(3, 32, generator=GENERATOR)
    total = residual + functional.linear(x, weight)
    result = linear.forward_then(x, norm.onto(residual))
    torch.testing.assert_close(residual, total, rtol=1e-4, atol=1e-4)
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_gated_mlp():
    mlp = GatedMLP(16, 20, bias=True, dtype=torch.float32)
    values = _fill(mlp)
    pack_weights(mlp)
    x = torch.randn(3, 16, generator=GENERATOR)
    gate, up = functional.linear(x, values["gate_up_proj.weight"], values["gate_up_proj.bias"]).split(20, -1)
    hidden = gate * torch.sigmoid(gate) * up
    expected = functional.linear(hidden, values["down_proj.weight"], values["down_proj.bias"])
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_and_head(dtype: torch.dtype):
    ids = torch.tensor([3, 0, 3, 49])
    x = torch.randn(2, 16, generator=GENERATOR).to(dtype)
    tied = TiedEmbedding(50, 16, dtype=dtype)
    table = _fill(tied)["weight"]
    pack_weights(tied)
    assert torch.equal(tied.embed(ids), table[ids])
    plain, head = TokenEmbedding(50, 16, dtype=dtype), OutputHead(16, 50, dtype=dtype)
    plain.weight.data.copy_(table)
    assert head.weight is not None
    head.weight.data.copy_(table)
    pack_weights(head)
    assert torch.equal(plain.embed(ids), table[ids])
    for layer in (tied, head):
        assert layer(x).dtype == torch.float32  # also of bf16 weights: nothing is rounded before the choice of a token
        torch.testing.assert_close(layer(x), x.float() @ table.float().T, rtol=1e-3, atol=1e-3)


def test_an_embedded_token_may_be_written_over():
    """Layers add to the embedding in place; the table must not see it."""
    tied = TiedEmbedding(10, 16, dtype=torch.float32)
    table = _fill(tied)["weight"]
    pack_weights(tied)
    tied.embed(torch.tensor([4])).zero_()
    assert torch.equal(tied.embed(torch.tensor([4])), table[[4]])


class _Recorder:
    """Stands for a resource: remembers which layer asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def layer(self, index: int) -> tuple[str, int]:
        self.asked.append(index)
        return ("handle", index)


def _two_layers() -> nn.Module:
    sizes = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "bias": False}
    keys = {"attn_key": "attn", "pos_key": "rope"}
    layers = [SelfAttention(index, **sizes, **keys, dtype=torch.float32) for index in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "sampler": Sampler("sampler")})


def test_layers_get_the_handles_of_their_own_index():
    module = _two_layers()
    resources = {key: _Recorder() for key in ("attn", "rope", "sampler", "unused")}
    bind_layers("LLM", module, resources)
    assert {key: resource.asked for key, resource in resources.items()} == {
        "attn": [0, 1],
        "rope": [0, 1],
        "sampler": [0],
        "unused": [],
    }


def test_a_layer_without_positions_asks_for_none():
    recorder = _Recorder()
    bind_layers("LLM", PagedAttention(3, attn_key="attn", pos_key=None), {"attn": recorder})
    assert recorder.asked == [3]


def test_a_missing_resource_is_named_with_node_and_layer():
    resources = {"attn": _Recorder(), "sampler": _Recorder()}
    with pytest.raises(LookupError, match=r"'layers\.0\.attend' of node 'LLM' uses resource 'rope'.*attn, sampler"):
        bind_layers("LLM", _two_layers(), resources)
