"""The Llama network against transformers' on the same random weights: logits, cached decode, chunked prompts."""

import pytest
import torch
from support.solo_resources import SoloResources, split
from support.tiny_llama import VARIANTS, Variant, build_reference, variant

from mstar.engine.spec import RotarySpec
from mstar.kernels import ops
from mstar.layers.linear import pack_weights
from mstar.model.base import ModelSetup
from mstar.model.llama.config import LlamaConfig
from mstar.model.llama.model import LlamaModel
from mstar.model.llama.network import LlamaNetwork
from mstar.model.llama.submodules import load_rules
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.module_loading import load_weights

TOLERANCE = 1e-4
PROMPT = [3, 141, 5, 92, 65, 35, 8, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88, 41, 97, 16, 93, 99, 37, 51, 58]


def _ours(v: Variant, reference):
    """(network, its resources): the reference's weights through the loader, the reference's own rotary tables."""
    mapping = reference.config.to_dict()
    config = LlamaConfig.from_mapping(mapping)
    network = LlamaNetwork(config, dtype=torch.float32, device="meta")
    weights = [(name, tensor.detach().clone()) for name, tensor in reference.state_dict().items()]
    load_weights(network, weights, load_rules(config))
    pack_weights(network)
    positions = torch.arange(256)[None]
    cos, sin = reference.model.rotary_emb(torch.zeros(1), positions)  # [1, 256, rotary_dim]
    half = config.rotary_dim // 2
    spec = LlamaModel(ModelSetup(mapping, None, 256)).get_node_resources()[0]
    resources = SoloResources(spec, cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
    resources.bind(network)
    return network, resources


def _logits(network: LlamaNetwork, tokens: list[int], last: list[int]) -> torch.Tensor:
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
    resources.begin(20)
    _assert_close(_logits(network, PROMPT[:20], list(range(20))), expected[:20])
    for position in range(20, len(PROMPT)):
        resources.begin(1)
        _assert_close(_logits(network, PROMPT[position : position + 1], [0]), expected[[position]])


@torch.no_grad()
def test_a_prompt_in_pieces_gives_the_same_logits():
    v = variant("grouped_queries_tied")
    reference = build_reference(v)
    expected = reference(torch.tensor([PROMPT])).logits[0, -1:]
    for parts in ([5], [16, 1, 3], [1, 1, 1]):
        network, resources = _ours(v, reference)
        start = 0
        for size in split(len(PROMPT), parts):
            resources.begin(size)
            logits = _logits(network, PROMPT[start : start + size], [size - 1])
            start += size
        _assert_close(logits, expected)


@torch.no_grad()
def test_hidden_states_equal_the_reference():
    v = variant("llama3_rope")
    reference = build_reference(v)
    network, resources = _ours(v, reference)
    resources.begin(len(PROMPT))
    expected = reference.model(torch.tensor([PROMPT])).last_hidden_state[0]
    _assert_close(network.forward_hidden(network.embed_tokens.embed(torch.tensor(PROMPT))), expected)


@pytest.mark.parametrize("name", ["llama3_rope", "linear_rope"])
def test_the_rope_variants_differ_from_plain_rope_at_this_length(name: str):
    """Otherwise they would prove nothing above."""
    scaled = variant(name).changes["rope_parameters"]
    plain = Variant("plain", {"rope_parameters": {"rope_type": "default", "rope_theta": scaled["rope_theta"]}})
    positions = torch.arange(len(PROMPT))[None]
    cos = [build_reference(v).model.rotary_emb(torch.zeros(1), positions)[0] for v in (variant(name), plain)]
    assert (cos[0] - cos[1]).abs().max() > 0.1


def test_scaling_of_the_rope_reaches_the_declaration():
    mapping = build_reference(variant("llama3_rope")).config.to_dict()
    specs = LlamaModel(ModelSetup(mapping, None, 256)).get_node_resources()[0].resources
    rope = next(spec for spec in specs if isinstance(spec, RotarySpec))
    assert rope.theta == 500.0
    assert rope.rotary_dim == 12
    assert rope.scaling is not None
    assert (rope.scaling.kind, rope.scaling.factor, rope.scaling.original_max_position) == ("llama3", 8.0, 32)


def test_a_checkpoint_without_a_weight_is_refused_by_name():
    reference = build_reference(variant("biases"))
    config = LlamaConfig.from_mapping(reference.config.to_dict())
    weights = [(n, t) for n, t in reference.state_dict().items() if n != "model.layers.1.mlp.up_proj.bias"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.gate_up_proj\.bias"):
        load_weights(LlamaNetwork(config, dtype=torch.float32, device="meta"), weights, load_rules(config))


@torch.no_grad()
def test_a_decode_forward_can_be_recorded():
    """It is made of kernel operations alone, so that it replays without the interpreter."""
    reference = build_reference(variant("grouped_queries_tied"))
    network, resources = _ours(variant("grouped_queries_tied"), reference)
    if ops.select_kernels() != "native":
        pytest.skip("the compiled kernels are not available on this machine")
    resources.begin(len(PROMPT))
    tokens, last = torch.tensor(PROMPT), torch.tensor([len(PROMPT) - 1])
    tape, logits = ops.record(lambda: network(network.embed_tokens.embed(tokens), last))
    expected = reference(tokens[None]).logits[0, -1:]
    _assert_close(logits, expected)
    tokens.copy_(tokens.flip(0))
    tape.replay()
    _assert_close(logits, reference(tokens[None]).logits[0, -1:])
    assert not torch.allclose(logits, expected, atol=1e-2)


def test_tied_embeddings_are_held_once():
    reference = build_reference(variant("grouped_queries_tied"))
    network, _ = _ours(variant("grouped_queries_tied"), reference)
    assert network.embed_tokens is network.lm_head
    assert list(network.parameters()) != []  # the norms
    assert all(parameter.dim() == 1 for parameter in network.parameters())
