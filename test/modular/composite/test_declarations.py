"""The composite's declarations: they compile for every placement, and say what the reference computes."""

from dataclasses import replace

import numpy as np
import pytest
from support.composite import reference
from support.composite.declarations import CODES, FRAME, LLM, MEDIA_TOKEN
from support.composite.deployment import CARD, CONFIG, PLACEMENTS, make_requests, node_groups
from support.composite.model import CompositeModel

from mstar.engine.spec import PagedKVSpec, SamplerSpec
from mstar.graph.base import nodes_of
from mstar.graph.compile import compile_walks
from mstar.graph.protocol import GraphError, ReadyKey
from mstar.model.base import ModelSetup
from mstar.model.registry import build_model, find_card


@pytest.fixture
def model() -> CompositeModel:
    built = build_model(find_card(CARD), ModelSetup(CONFIG, None, 256))
    assert isinstance(built, CompositeModel)
    return built


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_compiles(model: CompositeModel, name: str):
    graph = compile_walks(model.walks(), model.partitions(), PLACEMENTS[name])
    ranks = sorted(set(PLACEMENTS[name].values()))
    keys = {key for rank in ranks for key in graph.keys_on(rank)}
    assert keys == {ReadyKey(node.name, walk) for walk, section in model.walks().items() for node in nodes_of(section)}
    assert graph.loops_around(ReadyKey(CODES, "speak")) == ("codes", "speak")
    assert graph.loops_around(ReadyKey(LLM, "speak")) == ("speak",)
    assert graph.loops_around(ReadyKey(LLM, "prefill")) == ()


def test_placements_span_one_two_and_three_workers():
    assert {len(set(ranks.values())) for ranks in PLACEMENTS.values()} == {1, 2, 3}
    for name, ranks in PLACEMENTS.items():
        groups = {node: group.ranks[0] for group in node_groups(name) for node in group.node_names}
        assert groups == ranks


def test_a_loop_over_two_workers_is_refused(model: CompositeModel):
    with pytest.raises(GraphError, match="speak"):
        compile_walks(model.walks(), model.partitions(), PLACEMENTS["one_worker"] | {CODES: 1})
    with pytest.raises(GraphError, match=r"frame|speak"):
        compile_walks(model.walks(), model.partitions(), PLACEMENTS["one_worker"] | {FRAME: 1})


def test_resources(model: CompositeModel):
    of = {node.node: {spec.key: spec for spec in node.resources} for node in model.get_node_resources()}
    assert set(of) == {LLM, CODES}
    assert isinstance(of[LLM]["kv"], PagedKVSpec)
    assert of[CODES]["code_sampler"] == SamplerSpec(
        "code_sampler", reference.CODE_VOCAB, samples_text=False, draws_in_forward=True
    )


def test_the_plan(model: CompositeModel):
    request = make_requests(1)[0]
    prompt = model.process_prompt(request.as_prompt())
    num_features = len(request.media) // 2
    assert prompt.token_ids is not None
    assert prompt.token_ids.tolist() == [MEDIA_TOKEN] * num_features + list(request.prompt)
    np.testing.assert_array_equal(prompt.inputs["media"], request.media.numpy())
    plan = model.plan_walks(prompt, 7)
    assert {p.partition: p.walks for p in plan.partitions} == {"main": ("prefill", "speak", "paint"), "audio": ()}
    assert plan.limits == {"speak_steps": 6}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": (MEDIA_TOKEN,)}, "prompt"),
        ({"prompt": ()}, "prompt"),
        ({"prompt": (reference.VOCAB,)}, "prompt"),
        ({"media": make_requests(1)[0].media[:-1]}, "media"),
        ({"latent": make_requests(1)[0].latent[:-1]}, "latent"),
    ],
)
def test_wrong_requests_are_refused(model: CompositeModel, change, named: str):
    request = make_requests(1)[0]
    model.process_prompt(request.as_prompt())
    with pytest.raises(ValueError, match=named):
        model.process_prompt(replace(request, **change).as_prompt())
