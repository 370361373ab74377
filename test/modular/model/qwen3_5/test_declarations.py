"""What a Qwen3.5 declares: configuration as checkpoints spell it, resources, walks, plans, features, stops."""

import numpy as np
import pytest
import torch
from support.row_columns import OddRowsStopAt7, row_columns
from support.tiny_qwen3_5 import BASE, EXPERTS, MEDIA, VARIANTS, VISION, Variant, build_reference, variant
from torch import nn

from mstar.engine.spec import (
    AttentionSpec,
    EncoderCacheSpec,
    LinearAttentionSpec,
    PagedKVSpec,
    RecurrentStateSpec,
    RotarySpec,
    SamplerSpec,
    StateBlock,
)
from mstar.engine.step import Rows, SamplerStep
from mstar.engine.submodule import EngineInputs
from mstar.graph.base import GraphNode, Loop, LoopLimit, nodes_of
from mstar.graph.compile import compile_walks
from mstar.model.base import ChatMessage, MediaPart, MediaSpan, ModelSetup, PreparedPrompt, PromptRequest
from mstar.model.qwen3_5.config import FULL, LINEAR, ExpertsConfig, MediaTokens, Qwen35Config
from mstar.model.qwen3_5.language_submodule import LanguageSubmodule, features_of, features_of_rows, put_features
from mstar.model.qwen3_5.model import Qwen35Model
from mstar.model.registry import build_model, card_for_config, find_card

# As the family's files spell it: the language model's facts apart, all kinds of token types at the top.
PUBLISHED = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "text_config": {
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "eos_token_id": 248044,
        "mlp_only_layers": [],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_heads": 12,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 1024,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [],
    },
    "tie_word_embeddings": True,
}


def test_published_config_is_understood():
    c = Qwen35Config.from_mapping(PUBLISHED)
    assert (c.rotary_dim, c.rope_theta, c.sections) == (64, 1e7, (11, 11, 10))
    assert c.layer_types == (LINEAR, LINEAR, LINEAR, FULL) * 6
    assert (c.num_full_layers, c.num_linear_layers) == (6, 18)
    assert c.conv_channels == 6144
    assert (c.tie_word_embeddings, c.eos_token_ids, c.experts) == (True, (248044,), None)
    assert c.media == MediaTokens(248056, 248057, 248053, 248054)
    assert c.vision is not None
    assert (c.vision.grid_side, c.vision.patch_size, c.vision.hidden_act) == (48, 16, "gelu_pytorch_tanh")


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_configs_that_transformers_writes_are_understood(v: Variant):
    reference = build_reference(v)
    c = Qwen35Config.from_mapping(reference.config.to_dict())
    text = reference.model.language_model if v.vision else reference.model
    assert c.rope_theta == 300.0
    assert c.rotary_dim == 2 * text.rotary_emb.inv_freq.numel()
    assert [kind == FULL for kind in c.layer_types] == [hasattr(layer, "self_attn") for layer in text.layers]
    assert (c.vision is not None) == v.vision
    assert c.experts == (ExpertsConfig(6, c.experts.num_chosen, 20, 28) if v.moe else None)
    assert c.tie_word_embeddings == v.changes.get("tie_word_embeddings", False)
    assert c.eos_token_ids == (2,)


def _with(**changes):
    return {**BASE, **changes}


def _with_vision(**changes):
    return {"text_config": BASE, "vision_config": {**VISION, **_TOWER, **changes}, **MEDIA}


_TOWER = {"in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (_with(hidden_act="gelu"), "hidden_act"),
        (_with(num_key_value_heads=3), "heads"),
        (_with(linear_num_value_heads=5), "value heads"),
        (_with(rope_parameters={"rope_type": "yarn"}), "yarn"),
        (_with(rope_parameters={"mrope_interleaved": False}), "mrope_interleaved"),
        (_with(rope_parameters={"mrope_section": [2, 2]}), "mrope_section"),
        (_with(layer_types=[LINEAR, FULL]), "layer_types"),
        (_with(layer_types=["sliding_attention"] * 6), "sliding_attention"),
        (_with(layer_types=[LINEAR] * 6), "mixes both"),
        (_with(attn_output_gate=False), "attn_output_gate"),
        (_with(mlp_only_layers=[0]), "mlp_only_layers"),
        (_with(vocab_size=None), "vocab_size"),
        (_with(num_experts=4), "num_experts_per_tok"),
        (_with_vision(num_position_embeddings=15), "num_position_embeddings"),
        (_with_vision(deepstack_visual_indexes=[1]), "deepstack"),
        (_with_vision(patch_size=[16, 14]), "patch_size"),
        ({**_with_vision(), "image_token_id": None}, "image_token_id"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config, named):
    with pytest.raises(ValueError, match=named):
        Qwen35Config.from_mapping(config)


def test_the_legal_neighbours_of_refused_configs():
    Qwen35Config.from_mapping(BASE)
    Qwen35Config.from_mapping(_with(**EXPERTS))
    both = Qwen35Config.from_mapping(_with_vision(patch_size=[16, 16], deepstack_visual_indexes=[]))
    assert both.vision is not None and both.vision.patch_size == 16


def _model(config=BASE) -> Qwen35Model:
    return Qwen35Model(ModelSetup(config, None, 128))


def test_resources_follow_the_config():
    (node,) = _model().get_node_resources()
    assert node.node == "LLM"
    conv, delta = StateBlock("conv", (3, 2 * 2 * 16 + 4 * 24)), StateBlock("delta", (4, 16, 24), wide=True)
    assert node.resources == (
        PagedKVSpec("kv", 2, 2, 32),
        AttentionSpec("attn", "kv", 4),
        RotarySpec("rope", "kv", 8, 300.0),
        RecurrentStateSpec("state", "kv", 4, (conv, delta)),
        LinearAttentionSpec("delta", "state", 2, 4, 16, 24, 4),
        SamplerSpec("sampler", 151),
    )


def test_with_a_tower_frequencies_follow_three_positions():
    resources = next(node for node in _model(_with_vision()).get_node_resources() if node.node == "LLM").resources
    rope = next(spec for spec in resources if isinstance(spec, RotarySpec))
    assert rope.sections == (2, 1, 1)


def test_walks_of_a_model_without_a_tower():
    walks = _model().walks()
    assert [node.name for section in walks.values() for node in nodes_of(section)] == ["LLM"] * 3
    decode = walks["decode"]
    assert isinstance(decode, Loop)
    assert decode.max_iters == LoopLimit("decode_steps")
    partitions = _model().partitions().partitions
    assert [(p.name, p.walks, p.stream_fed) for p in partitions] == [("text", ("prefill", "decode", "embed"), False)]


def test_walks_of_a_model_with_a_tower():
    model = _model(_with_vision())
    walks = model.walks()
    assert {walk: nodes_of(section)[0].name for walk, section in walks.items()} == {
        "encode": "Vision",
        "prefill": "LLM",
        "decode": "LLM",
        "embed": "LLM",
    }
    encode, prefill = walks["encode"], walks["prefill"]
    assert isinstance(encode, Loop) and isinstance(prefill, GraphNode)
    assert encode.max_iters == LoopLimit("vision_steps")
    assert [(edge.name, edge.persist) for edge in encode.outputs] == [("features", True)]
    assert prefill.input_names == ("features",)
    assert prefill.optional_inputs == {"features"}
    (partition,) = model.partitions().partitions
    assert (partition.walks, partition.request_inputs) == (("encode", "prefill", "decode", "embed"), ("pixels",))
    compile_walks(walks, model.partitions(), {"LLM": 0, "Vision": 1})
    vision = next(node for node in model.get_node_resources() if node.node == "Vision")
    assert [spec.width for spec in vision.resources if isinstance(spec, EncoderCacheSpec)] == [48]


def test_media_are_encoded_before_the_prompt_is_read():
    model = _model(_with_vision())
    span = MediaSpan(1, 6, b"digest", (1, 2, 3))
    ids = np.array([142, *[140] * 6, 143], np.int32)
    prompt = PreparedPrompt(ids, {"pixels": np.zeros((24, 1536), np.uint8)}, media=(span,))
    plan = model.plan_walks(prompt, 5)
    assert plan.partitions[0].walks == ("encode", "prefill", "decode")
    assert plan.limits["decode_steps"] == 4
    assert 1 <= plan.limits["vision_steps"] <= VISION["depth"]
    text = model.plan_walks(model.process_prompt(PromptRequest("native", token_ids=(5, 6))), 5)
    assert text.partitions[0].walks == ("prefill", "decode")


def test_media_for_a_model_without_a_tower_are_the_clients_error():
    messages = (ChatMessage("user", ("look", MediaPart("image", b"..."))),)
    with pytest.raises(ValueError, match="reads text only"):
        _model().process_prompt(PromptRequest("chat", messages=messages))


@pytest.mark.parametrize("token", [140, 141])
def test_media_tokens_without_media_are_the_clients_error(token: int):
    with pytest.raises(ValueError, match="none was sent"):
        _model(_with_vision()).process_prompt(PromptRequest("native", token_ids=(5, token)))
    prompt = _model(_with_vision()).process_prompt(PromptRequest("native", token_ids=(5, 139, 142)))
    assert prompt.token_ids.tolist() == [5, 139, 142]
    assert _model().process_prompt(PromptRequest("native", token_ids=(5, token))).token_ids.tolist() == [5, token]


def test_what_a_checkpoint_takes():
    card = find_card("qwen3_5")
    assert build_model(card, ModelSetup(BASE, None, 128)).input_modalities() == ("text",)
    assert build_model(card, ModelSetup(_with_vision(), None, 128)).input_modalities() == ("text", "image", "video")
    assert card_for_config(PUBLISHED) is card


def test_a_plan_counts_the_token_that_prefill_samples():
    model = _model()
    prompt = model.process_prompt(PromptRequest("native", token_ids=(5, 6)))
    plan = model.plan_walks(prompt, 16)
    assert plan.partitions[0].walks == ("prefill", "decode")
    assert plan.limits == {"decode_steps": 15}


def test_answers_think_and_call_tools():
    form = _model().output_format()
    assert form.reasoning == ("<think>", "</think>")
    assert form.tool_calls == "function_tags"
    assert list(_model().stop_token_ids()) == [2]
    assert _model().vocab_size() == 151


IMAGE, VIDEO = 140, 141
TOKENS = MediaTokens(IMAGE, VIDEO, 142, 143)


def _node(media: MediaTokens | None) -> LanguageSubmodule:
    node = LanguageSubmodule(nn.Module(), media)
    node.sampler = OddRowsStopAt7()
    return node


def test_prefill_asks_for_what_the_cache_lacks():
    batch = _node(None).prepare_batch(
        "prefill", row_columns([4, 2, 9], [0, 2, 3], [[10, 11], [20, 21, 22], [1, 2, 3, 4]])
    )
    assert batch.spans.tolist() == [2, 1, 1]
    assert batch.token_ids.tolist() == [10, 11, 22, 4]
    assert batch.token_columns is None
    decode = _node(TOKENS).prepare_batch("decode", row_columns([4, 2], [2, 3], [[10, 11], [20, 21, 22]]))
    assert (decode.spans.tolist(), decode.token_ids.tolist(), decode.token_columns) == ([1, 1], [-1, -1], None)


def test_media_tokens_count_up_from_the_prompts_beginning():
    assert features_of(np.array([5, 142, IMAGE, IMAGE, 143, 6, VIDEO, 7]), TOKENS).tolist() == [
        *(-1, -1, 0, 1, -1, -1, 2, -1),
    ]
    prompts = [[IMAGE, 5, IMAGE, 6, VIDEO], [1, 2], [9, IMAGE]]
    batch = _node(TOKENS).prepare_batch("prefill", row_columns([1, 2, 3], [2, 0, 0], prompts))
    assert batch.token_ids.tolist() == [IMAGE, 6, VIDEO, 1, 2, 9, IMAGE]
    assert batch.token_columns["feature"].tolist() == [1, -1, 2, -1, -1, -1, 0]
    assert batch.token_columns["feature"].dtype == np.int32


def test_a_step_touches_both_memories():
    rows = Rows(np.array([1]), np.array([3], np.int32))
    step = _node(None).declare_step("prefill", rows, np.array([True]))
    assert set(step.steps) == {"kv", "attn", "rope", "state", "delta", "sampler"}
    sampler = step.steps["sampler"]
    assert isinstance(sampler, SamplerStep)
    assert sampler.kept is not None and sampler.kept.tolist() == [True]


def test_stopping_ends_the_loop_or_the_prefill():
    node = _node(None)
    columns = row_columns([1, 2, 3], [1, 1, 1], [[1], [1], [1]])
    (decode,) = node.check_stop("decode", columns, {"token": np.array([7, 7, 7])})
    assert (decode.index.tolist(), decode.loop, decode.finish) == ([0, 2], "decode", True)
    (prefill,) = node.check_stop("prefill", columns, {"token": np.array([7, 7, 1])})
    assert (prefill.index.tolist(), prefill.loop, prefill.finish) == ([0], None, True)
    assert node.check_stop("decode", columns, {"token": np.array([1, 7, 2])}) == []


def test_chunks_end_where_the_delta_rule_has_its_blocks():
    node = _node(None)
    prefill = node.get_chunking_policy("prefill")
    assert prefill is not None
    assert (prefill.chunked, prefill.align, prefill.reuse_prefix, prefill.recomputable) == (True, 64, True, True)
    assert prefill.keep_final_chunk_samples
    decode = node.get_chunking_policy("decode")
    assert decode is not None
    assert decode.batch_with == ("prefill",)
    assert [config.walk for config in node.get_cuda_graph_configs()] == ["decode", "prefill"]


def _inputs(tensors=None, ragged=None) -> EngineInputs:
    return EngineInputs(2, None, None, tensors or {}, ragged or {}, torch.zeros(2))


def test_features_are_found_however_rows_look():
    features = torch.arange(12.0).view(2, 3, 2)
    assert features_of_rows(_inputs()) == ()
    assert torch.equal(torch.stack(list(features_of_rows(_inputs({"features": features})))), features)
    mixed = [torch.ones(2, 2), torch.empty(0)]
    assert features_of_rows(_inputs(ragged={"features": mixed})) is mixed
    assert len(features_of_rows(_inputs(ragged={"features": [torch.empty(0), torch.empty(0)]}))) == 0


def test_features_take_the_place_of_media_tokens_of_their_row():
    x = -torch.arange(1.0, 8.0).unsqueeze(1).repeat(1, 2)  # 7 tokens of rows of 3, 1 and 3 tokens
    features = [torch.tensor([[10.0, 10.5], [11.0, 11.5]]), torch.empty(0), torch.tensor([[20.0, 20.5]] * 3) + 0.25]
    column = torch.tensor([-1, 1, 0, -1, 2, -1, 0])
    out = put_features(x, column, torch.tensor([2, 3, 6]), features)
    assert out[:, 0].tolist() == [-1.0, 11.0, 10.0, -4.0, 20.25, -6.0, 20.25]
    assert out[:, 1].tolist() == [-1.0, 11.5, 10.0 + 0.5, -4.0, 20.75, -6.0, 20.75]
    assert x[:, 0].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]


def test_features_have_the_embeddings_type():
    x = torch.zeros(2, 2, dtype=torch.bfloat16)
    out = put_features(x, torch.tensor([0, -1]), torch.tensor([1]), [torch.full((1, 2), 1.5)])
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[1.5, 1.5], [0.0, 0.0]]


def test_the_variants_are_told_apart():
    """Otherwise the tests of several would be tests of one."""
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)
    assert build_reference(variant("experts")).config.num_experts == 6
