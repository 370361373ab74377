import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.load_rules import LoadRules, RenameRule, StackRule, TieRule
from mstar.model.loader.module_loading import load_weights

RULES = LoadRules(
    renames=(RenameRule("model.", ""),),
    stacks=(
        StackRule("qkv_proj.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        StackRule("gate_up_proj.weight", ("gate_proj.weight", "up_proj.weight")),
    ),
    ties=(TieRule("lm_head.weight", "embed_tokens.weight"),),
    ignore=("*.rotary_emb.inv_freq", "mtp.*"),
)
UNTIED = replace(RULES, ties=())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(4, 8, bias=False)
        self.gate_up_proj = nn.Linear(4, 12, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))


SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    **{
        f"model.layers.{index}.{name}.weight": shape
        for index in range(2)
        for name, shape in {
            "q_proj": (4, 4),
            "k_proj": (2, 4),
            "v_proj": (2, 4),
            "gate_proj": (6, 4),
            "up_proj": (6, 4),
            "norm": (4,),
        }.items()
    },
    "lm_head.weight": (10, 4),
}


def _checkpoint() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**weights, "steps": torch.tensor([3, 1, 4])}


def _expected(weights: dict[str, torch.Tensor], *, tied: bool) -> dict[str, torch.Tensor]:
    expected = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "lm_head.weight": weights["model.embed_tokens.weight" if tied else "lm_head.weight"],
        "steps": weights["steps"],
    }
    for index in range(2):
        part = {name: weights[f"model.layers.{index}.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")}
        expected[f"layers.{index}.qkv_proj.weight"] = torch.cat(list(part.values()))
        both = (weights[f"model.layers.{index}.{name}.weight"] for name in ("gate_proj", "up_proj"))
        expected[f"layers.{index}.gate_up_proj.weight"] = torch.cat(list(both))
        expected[f"layers.{index}.norm.weight"] = weights[f"model.layers.{index}.norm.weight"]
    return expected


def _assert_holds(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = module.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor.to(state[name].dtype), rtol=0, atol=0, msg=name)


def _network(*, meta: bool) -> Network:
    with torch.device("meta" if meta else "cpu"):
        return Network()


@given(st.permutations(sorted(_checkpoint())), st.booleans(), st.booleans())
def test_every_order_of_tensors_fills_the_module(order: list[str], meta: bool, tied: bool):
    weights, network = _checkpoint(), _network(meta=meta)
    report = load_weights(network, ((name, weights[name]) for name in order), RULES if tied else UNTIED)
    _assert_holds(network, _expected(weights, tied=tied))
    assert report.ignored == (("lm_head.weight",) if tied else ())
    assert report.num_tensors == len(weights) - tied
    unique = {id(tensor): tensor.nbytes for tensor in network.state_dict(keep_vars=True).values()}
    assert report.num_bytes == sum(unique.values())
    assert (network.lm_head.weight is network.embed_tokens.weight) == tied


def test_memory_that_exists_is_filled_in_place():
    network = _network(meta=False)
    before = {name: tensor.data_ptr() for name, tensor in network.state_dict().items()}
    load_weights(network, _checkpoint().items(), UNTIED)
    assert {name: tensor.data_ptr() for name, tensor in network.state_dict().items()} == before


def test_meta_parameters_keep_type_gradients_and_attributes():
    network = _network(meta=True).to(torch.bfloat16).requires_grad_(False)
    network.layers[0].norm.weight.label = "norm"
    load_weights(network, _checkpoint().items(), UNTIED)
    parameter = network.layers[0].norm.weight
    assert (parameter.dtype, parameter.device.type) == (torch.bfloat16, "cpu")
    assert isinstance(parameter, nn.Parameter)
    assert not parameter.requires_grad
    assert parameter.label == "norm"
    assert "steps" in dict(network.named_buffers())
    _assert_holds(network, _expected(_checkpoint(), tied=False))


@pytest.mark.parametrize("meta", [True, False])
def test_a_parameter_that_the_module_shares_stays_shared(meta: bool):
    network = _network(meta=meta)
    network.lm_head.weight = network.embed_tokens.weight
    weights = _checkpoint()
    del weights["lm_head.weight"]
    load_weights(network, weights.items(), UNTIED)
    assert network.lm_head.weight is network.embed_tokens.weight
    _assert_holds(network, _expected(weights, tied=True))


def test_a_module_without_the_tied_target_needs_none():
    network = _network(meta=True)
    del network.lm_head
    load_weights(network, _checkpoint().items(), RULES)
    torch.testing.assert_close(network.embed_tokens.weight.detach(), _checkpoint()["model.embed_tokens.weight"])


def test_ignored_names_are_reported_and_not_used():
    extra = {"mtp.layers.0.weight": torch.ones(3), "model.layers.0.rotary_emb.inv_freq": torch.ones(2)}
    report = load_weights(_network(meta=True), {**extra, **_checkpoint()}.items(), UNTIED)
    assert report.ignored == tuple(extra)


def _refusal(weights: dict[str, torch.Tensor], rules: LoadRules = UNTIED, *, meta: bool = True) -> str:
    with pytest.raises(CheckpointError, match="does not fit Network") as caught:
        load_weights(_network(meta=meta), weights.items(), rules)
    return str(caught.value)


@pytest.mark.parametrize("meta", [True, False])
def test_everything_that_is_wrong_is_listed_at_once(meta: bool):
    weights = _checkpoint()
    del weights["model.layers.0.norm.weight"]
    del weights["model.layers.1.k_proj.weight"]
    weights["model.layers.0.extra.weight"] = torch.ones(2)
    weights["model.layers.2.q_proj.weight"] = torch.ones(4, 4)
    weights["model.embed_tokens.weight"] = torch.ones(10, 5)
    weights["model.layers.0.k_proj.weight"] = torch.ones(3, 4)
    weights["model.layers.0.up_proj.weight"] = torch.ones(6, 3)
    weights["steps"] = torch.ones(3)
    lines = _refusal(weights, meta=meta).splitlines()[1:]
    assert lines == [
        "  missing: layers.0.norm.weight, layers.1.qkv_proj.weight (its k_proj.weight), "
        "layers.2.qkv_proj.weight (its k_proj.weight, v_proj.weight)",
        "  unexpected: layers.0.extra.weight",
        "  wrong shape: embed_tokens.weight: module [10, 4], checkpoint [10, 5], "
        "layers.0.gate_up_proj.weight: module [12, 4], checkpoint [6, 4] + [6, 3], "
        "layers.0.qkv_proj.weight: module [8, 4], checkpoint [4, 4] + [3, 4] + [2, 4]",
        "  wrong type: steps: module torch.int64, checkpoint torch.float32",
    ]


def test_parts_of_the_right_size_in_total_but_transposed_are_refused():
    weights = _checkpoint()
    weights["model.layers.0.gate_proj.weight"] = torch.ones(4, 6)
    assert "wrong shape: layers.0.gate_up_proj.weight" in _refusal(weights)


@pytest.mark.parametrize("name", ["model.layers.0.norm.weight", "model.layers.0.q_proj.weight"])
def test_a_tensor_that_comes_twice_is_an_error(name: str):
    weights = list(_checkpoint().items())
    with pytest.raises(CheckpointError, match="given twice"):
        load_weights(_network(meta=True), [*weights, (name, dict(weights)[name])], UNTIED)


def test_two_values_for_a_shared_parameter_are_an_error_unless_tied():
    network = _network(meta=True)
    network.lm_head.weight = network.embed_tokens.weight
    with pytest.raises(CheckpointError, match=r"given twice: lm_head\.weight"):
        load_weights(network, _checkpoint().items(), UNTIED)
    network = _network(meta=True)
    network.lm_head.weight = network.embed_tokens.weight
    load_weights(network, _checkpoint().items(), RULES)
    _assert_holds(network, _expected(_checkpoint(), tied=True))


def test_the_target_of_a_tie_does_not_excuse_a_missing_source():
    weights = _checkpoint()
    del weights["model.embed_tokens.weight"]
    assert "missing: embed_tokens.weight, lm_head.weight" in _refusal(weights, RULES)


def test_a_buffer_outside_the_checkpoint_may_not_stay_on_meta():
    network = _network(meta=True)
    network.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match=r"left on the meta device.*table"):
        load_weights(network, _checkpoint().items(), UNTIED)


def test_long_lists_are_cut():
    weights = {**_checkpoint(), **{f"extra.{index:03}": torch.ones(1) for index in range(100)}}
    message = _refusal(weights)
    assert "extra.039, and 60 more" in message
    assert "extra.040" not in message


def test_at_most_the_parts_of_one_packed_parameter_are_held():
    alive: list[weakref.ref] = []
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in _checkpoint().items():
            tensor = tensor.clone()
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            most = max(most, sum(reference() is not None for reference in alive))

    load_weights(_network(meta=True), stream(), UNTIED)
    assert 2 <= most <= 4, "q, k and the name that the loader holds now"


def test_progress_counts_module_bytes():
    reports: list[tuple[str, int, int | None]] = []
    network = _network(meta=True)
    load_weights(network, _checkpoint().items(), RULES, progress=lambda *report: reports.append(report))
    done = [done for _, done, _ in reports]
    assert done == sorted(done)
    assert done[0] == 0
    tied_bytes = network.lm_head.weight.nbytes
    assert reports[-1][1] == reports[-1][2] == sum(t.nbytes for t in network.state_dict().values()) - tied_bytes
