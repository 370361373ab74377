"""The Qwen3.5 language model against transformers' on the same random weights: logits, cached decode, cut prompts."""

import pytest
import torch
from support.qwen3_5_solo import HybridResources
from support.solo_resources import split
from support.tiny_qwen3_5 import VARIANTS, Variant, build_reference, variant

from mstar.kernels import ops
from mstar.layers.linear import pack_weights
from mstar.model.base import ModelSetup
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.module_loading import load_weights
from mstar.model.qwen3_5.config import Qwen35Config
from mstar.model.qwen3_5.model import LANGUAGE, Qwen35Model, is_of_language_model
from mstar.model.qwen3_5.network import Qwen35Network
from mstar.model.qwen3_5.submodules import load_rules

TOLERANCE = 1e-4
PROMPT = torch.randint(3, 140, (150,), generator=torch.Generator().manual_seed(5)).tolist()


def _ours(v: Variant, reference):
    """(network, its resources): the reference's weights through the loader, the reference's own rotary tables."""
    mapping = reference.config.to_dict()
    config = Qwen35Config.from_mapping(mapping)
    network = Qwen35Network(config, dtype=torch.float32, device="meta")
    weights = [(n, t.detach().clone()) for n, t in reference.state_dict().items() if is_of_language_model(n)]
    load_weights(network, weights, load_rules(config))
    pack_weights(network)
    text = reference.model.language_model if v.vision else reference.model
    positions = torch.arange(512)[None]
    cos, sin = text.rotary_emb(torch.zeros(1), positions)  # [1, 512, rotary_dim]
    half = config.rotary_dim // 2
    specs = Qwen35Model(ModelSetup(mapping, None, 512)).get_node_resources()
    spec = next(spec for spec in specs if spec.node == LANGUAGE)
    resources = HybridResources(spec, cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
    resources.bind(network)
    return network, resources


def _logits(network, tokens: list[int], last: list[int]) -> torch.Tensor:
    return network(network.embed_tokens.embed(torch.tensor(tokens)), torch.tensor(last))


def _assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert (ours - reference).norm() <= TOLERANCE * reference.norm()
    torch.testing.assert_close(ours, reference, rtol=TOLERANCE, atol=TOLERANCE * float(reference.abs().max()))


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
@torch.no_grad()
def test_logits_equal_the_reference_in_prefill_and_decode(v: Variant):
    reference = build_reference(v)
    network, resources = _ours(v, reference)
    expected = reference(torch.tensor([PROMPT])).logits[0]  # [tokens, vocab]
    resources.begin(130)
    _assert_close(_logits(network, PROMPT[:130], list(range(130))), expected[:130])
    for position in range(130, len(PROMPT)):
        resources.begin(1)
        _assert_close(_logits(network, PROMPT[position : position + 1], [0]), expected[[position]])


@torch.no_grad()
@pytest.mark.parametrize("parts", [[64], [64, 64], [5], [64, 1, 3], [1, 1, 1]], ids=str)
def test_a_prompt_in_pieces_gives_the_same_logits(parts: list[int]):
    reference = build_reference(variant("dense"))
    expected = reference(torch.tensor([PROMPT])).logits[0, -1:]
    network, resources = _ours(variant("dense"), reference)
    start = 0
    for size in split(len(PROMPT), parts):
        resources.begin(size)
        logits = _logits(network, PROMPT[start : start + size], [size - 1])
        start += size
    _assert_close(logits, expected)


@torch.no_grad()
def test_hidden_states_equal_the_reference():
    reference = build_reference(variant("experts"))
    network, resources = _ours(variant("experts"), reference)
    resources.begin(len(PROMPT))
    expected = reference.model(torch.tensor([PROMPT])).last_hidden_state[0]
    _assert_close(network.forward_hidden(network.embed_tokens.embed(torch.tensor(PROMPT))), expected)


@pytest.mark.parametrize("name", ["dense", "experts"])
@torch.no_grad()
def test_a_decode_forward_can_be_recorded(name: str):
    """It is made of kernel operations alone, so that it replays without the interpreter."""
    if ops.select_kernels() != "native":
        pytest.skip("the compiled kernels are not available on this machine")
    reference = build_reference(variant(name))
    network, resources = _ours(variant(name), reference)
    resources.begin(70)
    _logits(network, PROMPT[:70], [69])
    resources.begin(1)
    states = {key: block.clone() for key, block in resources.blocks.items()}
    tokens, last = torch.tensor([PROMPT[70]]), torch.tensor([0])
    tape, logits = ops.record(lambda: network(network.embed_tokens.embed(tokens), last))
    expected = reference(torch.tensor([PROMPT[:71]])).logits[0, -1:]
    _assert_close(logits, expected)
    assert tape.num_torch_operations == 0
    for key, block in states.items():
        resources.blocks[key].copy_(block)
    tokens.copy_(torch.tensor([PROMPT[71]]))
    tape.replay()
    other = reference(torch.tensor([[*PROMPT[:70], PROMPT[71]]])).logits[0, -1:]
    _assert_close(logits, other)
    assert not torch.allclose(other, expected, atol=1e-2)


@torch.no_grad()
def test_every_part_of_a_layer_counts():
    """A weight that the network did not read would make the comparison above worthless for it."""
    reference = build_reference(variant("experts"))
    expected = reference(torch.tensor([PROMPT[:70]])).logits[0]
    deaf = []
    for name, parameter in reference.named_parameters():
        if ".layers.0." not in name and ".layers.2.self_attn." not in name:
            continue
        kept = parameter.clone()
        parameter.mul_(1.5).add_(0.1)
        change = (reference(torch.tensor([PROMPT[:70]])).logits[0] - expected).norm() / expected.norm()
        parameter.copy_(kept)
        if change < 20 * TOLERANCE:
            deaf.append((name, float(change)))
    assert deaf == []


@pytest.mark.parametrize(
    ("name", "missing", "told"),
    [
        ("dense", "model.layers.2.self_attn.q_proj.weight", r"layers\.2\.self_attn\.qkv_gate_proj\.weight"),
        ("dense", "model.layers.0.linear_attn.in_proj_a.weight", r"layers\.0\.linear_attn\.in_proj\.weight"),
        ("dense", "model.layers.4.linear_attn.A_log", r"layers\.4\.linear_attn\.a_log"),
        ("dense", "lm_head.weight", r"missing: lm_head\.weight"),
        ("experts", "model.layers.1.mlp.shared_expert_gate.weight", r"layers\.1\.mlp\.router\.weight"),
    ],
)
def test_a_checkpoint_without_a_weight_is_refused_by_name(name: str, missing: str, told: str):
    reference = build_reference(variant(name))
    config = Qwen35Config.from_mapping(reference.config.to_dict())
    weights = [(n, t) for n, t in reference.state_dict().items() if n != missing]
    assert len(weights) == len(reference.state_dict()) - 1
    with pytest.raises(CheckpointError, match=told):
        load_weights(Qwen35Network(config, dtype=torch.float32, device="meta"), weights, load_rules(config))


def test_a_tensor_that_the_model_does_not_know_is_refused():
    reference = build_reference(variant("dense"))
    config = Qwen35Config.from_mapping(reference.config.to_dict())
    weights = {**reference.state_dict(), "model.layers.0.linear_attn.extra": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"unexpected: layers\.0\.linear_attn\.extra"):
        load_weights(Qwen35Network(config, dtype=torch.float32, device="meta"), weights.items(), load_rules(config))


def test_tied_embeddings_are_held_once_and_exponents_wide():
    v = variant("as_many_value_heads_tied")
    reference = build_reference(v)
    config = Qwen35Config.from_mapping(reference.config.to_dict())
    network = Qwen35Network(config, dtype=torch.bfloat16, device="meta")
    weights = [(name, tensor.detach().clone()) for name, tensor in reference.state_dict().items()]
    load_weights(network, weights, load_rules(config))
    pack_weights(network)
    assert network.embed_tokens is network.lm_head
    delta = network.layers[0].linear_attn.weights
    torch.testing.assert_close(delta.a_log, reference.model.layers[0].linear_attn.A_log.detach(), rtol=0, atol=0)
    assert (delta.dt_bias.dtype, delta.conv.dtype) == (torch.float32, torch.bfloat16)
    assert delta.conv.shape == (2 * 2 * 16 + 2 * 24, 4)
    assert all(parameter.dim() == 1 for parameter in network.parameters())  # norms; the rest is packed
