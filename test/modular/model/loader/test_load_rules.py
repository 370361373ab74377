"""Rules for tensors that a checkpoint packs differently: parts that take turns, and experts one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.load_rules import ExpertRule, LoadRules, RenameRule, SplitRule, StackRule
from mstar.model.loader.module_loading import load_weights

HEADS, HEAD_DIM, HIDDEN = 3, 2, 5
RULES = LoadRules(
    renames=(RenameRule("model.", ""),),
    splits=(
        SplitRule("attn.q_proj.weight", ("attn.q_proj.query", "attn.q_proj.gate"), HEADS),
        SplitRule("attn.q_proj.bias", ("attn.q_proj.query_bias", "attn.q_proj.gate_bias"), HEADS),
    ),
    stacks=(
        StackRule("attn.proj.weight", ("attn.q_proj.query", "attn.k_proj.weight", "attn.q_proj.gate")),
        StackRule("attn.proj.bias", ("attn.q_proj.query_bias", "attn.k_proj.bias", "attn.q_proj.gate_bias")),
    ),
    experts=(
        ExpertRule("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight"), 12),
        ExpertRule("experts.down_proj", ("down_proj.weight",), 12),
    ),
)


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(12, 2 * width, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(12, HIDDEN, width))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.proj = nn.Linear(HIDDEN, (2 * HEADS + 1) * HEAD_DIM)
        self.experts = Experts(4)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))


def _network(*, meta: bool = True) -> Network:
    with torch.device("meta" if meta else "cpu"):
        return Network()


def _checkpoint(*, whole: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        stem = f"model.layers.{layer}."
        shapes |= {
            stem + "attn.q_proj.weight": (HEADS * 2 * HEAD_DIM, HIDDEN),
            stem + "attn.q_proj.bias": (HEADS * 2 * HEAD_DIM,),
            stem + "attn.k_proj.weight": (HEAD_DIM, HIDDEN),
            stem + "attn.k_proj.bias": (HEAD_DIM,),
        }
        if whole:
            shapes |= {stem + "experts.gate_up_proj": (12, 8, HIDDEN), stem + "experts.down_proj": (12, HIDDEN, 4)}
        for expert in () if whole else range(12):
            shapes |= {
                stem + f"experts.{expert}.gate_proj.weight": (4, HIDDEN),
                stem + f"experts.{expert}.up_proj.weight": (4, HIDDEN),
                stem + f"experts.{expert}.down_proj.weight": (HIDDEN, 4),
            }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _rows(tensor: torch.Tensor, *, gates: bool) -> list[torch.Tensor]:
    """Rows of the queries or of the gates: each head has its queries first."""
    heads = [tensor[start : start + 2 * HEAD_DIM] for start in range(0, len(tensor), 2 * HEAD_DIM)]
    return [row for head in heads for row in (head[HEAD_DIM:] if gates else head[:HEAD_DIM])]


@pytest.mark.parametrize("whole", [True, False])
@given(st.randoms(use_true_random=False), st.booleans())
def test_turns_and_experts_find_their_places(whole: bool, random, meta: bool):
    weights, network = _checkpoint(whole=whole), _network(meta=meta)
    order = sorted(weights)
    random.shuffle(order)
    report = load_weights(network, ((name, weights[name]) for name in order), RULES)
    assert report.num_tensors == len(weights)
    for index, layer in enumerate(network.layers):
        stem = f"model.layers.{index}."
        for kind in ("weight", "bias"):
            q, k = weights[stem + "attn.q_proj." + kind], weights[stem + "attn.k_proj." + kind]
            expected = torch.stack([*_rows(q, gates=False), *k, *_rows(q, gates=True)])
            torch.testing.assert_close(getattr(layer.attn.proj, kind).data, expected, rtol=0, atol=0)
        for expert in range(12):
            if whole:
                gate_up, down = (weights[stem + "experts." + n][expert] for n in ("gate_up_proj", "down_proj"))
            else:
                gate, up, down = (
                    weights[stem + f"experts.{expert}.{n}.weight"] for n in ("gate_proj", "up_proj", "down_proj")
                )
                gate_up = torch.cat([gate, up])
            torch.testing.assert_close(layer.experts.gate_up_proj.data[expert], gate_up, rtol=0, atol=0)
            torch.testing.assert_close(layer.experts.down_proj.data[expert], down, rtol=0, atol=0)


def _refusal(weights: dict[str, torch.Tensor]) -> str:
    with pytest.raises(CheckpointError) as raised:
        load_weights(_network(), weights.items(), RULES)
    return str(raised.value)


def test_a_missing_expert_is_named():
    weights = _checkpoint(whole=False)
    del weights["model.layers.1.experts.11.up_proj.weight"]
    text = _refusal(weights)
    assert "layers.1.experts.gate_up_proj (its 11.up_proj.weight)" in text
    assert "layers.0" not in text


def test_an_expert_too_many_is_unexpected():
    weights = _checkpoint(whole=False)
    weights["model.layers.0.experts.12.up_proj.weight"] = torch.zeros(4, HIDDEN)
    assert "unexpected: layers.0.experts.12.up_proj.weight" in _refusal(weights)


@pytest.mark.parametrize("name", ["attn.q_proj.weight", "experts.3.gate_proj.weight", "attn.q_proj.bias"])
def test_a_tensor_that_comes_twice_is_an_error(name: str):
    weights = _checkpoint(whole=False)
    twice = ("model.layers.0." + name, weights["model.layers.0." + name])
    with pytest.raises(CheckpointError, match="given twice"):
        load_weights(_network(), [*weights.items(), twice], RULES)


def test_an_expert_both_alone_and_whole_is_an_error():
    weights = {**_checkpoint(whole=True), "model.layers.0.experts.0.down_proj.weight": torch.zeros(HIDDEN, 4)}
    assert "layers.0.experts.down_proj (its" in _refusal(weights)


def test_shapes_that_cannot_be_split_are_refused():
    weights = _checkpoint(whole=True)
    weights["model.layers.1.attn.q_proj.weight"] = torch.zeros(11, HIDDEN)
    text = _refusal(weights)
    assert "layers.1.attn.q_proj.weight: 3 groups of 2 parts, checkpoint [11, 5]" in text


def test_experts_of_another_width_are_refused():
    weights = _checkpoint(whole=False)
    for expert in range(12):
        weights[f"model.layers.0.experts.{expert}.down_proj.weight"] = torch.zeros(HIDDEN, 3)
    assert "layers.0.experts.down_proj: module [12, 5, 4]" in _refusal(weights)
