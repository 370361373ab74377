"""What a Llama declares: configuration as checkpoints spell it, walks, resources, plans, prompts, stops."""

import json

import numpy as np
import pytest
from support.row_columns import OddRowsStopAt7, row_columns
from support.tiny_llama import BASE, LLAMA3_ROPE
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from mstar.engine.spec import AttentionSpec, PagedKVSpec, RopeScaling, RotarySpec, SamplerSpec
from mstar.engine.step import Rows, SamplerStep
from mstar.graph.base import Loop, LoopLimit, nodes_of
from mstar.model.base import ChatMessage, ModelSetup, PromptRequest
from mstar.model.llama.config import LlamaConfig
from mstar.model.llama.model import LlamaModel
from mstar.model.llama.submodules import LlamaSubmodule
from mstar.model.loader.tokenizer_files import TokenizerFiles

# As Meta published it for Llama 3.2 1B: theta and scaling on their own, no head_dim in older files.
LLAMA_3_2 = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip


def test_published_config_is_understood():
    config = LlamaConfig.from_mapping(LLAMA_3_2)
    assert (config.head_dim, config.num_kv_heads, config.rotary_dim) == (64, 8, 64)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.tie_word_embeddings


def test_both_spellings_of_the_rope_mean_the_same():
    new = LlamaConfig.from_mapping({**BASE, "rope_parameters": LLAMA3_ROPE})
    old = LlamaConfig.from_mapping({**BASE, "rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE})
    assert new == old
    assert new.rope_theta == 500.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        LlamaConfig.from_mapping({**BASE, **change})
    LlamaConfig.from_mapping(BASE)


def _model(tokenizer_dir=None) -> LlamaModel:
    return LlamaModel(ModelSetup(BASE, tokenizer_dir, 128))


def test_resources_follow_the_config():
    (node,) = _model().get_node_resources()
    assert node.node == "LLM"
    assert node.resources == (
        PagedKVSpec("kv", 3, 2, 12),
        AttentionSpec("attn", "kv", 4),
        RotarySpec("rope", "kv", 12, 10000.0, None),
        SamplerSpec("sampler", 151),
    )


def test_walks_prefill_then_a_decode_loop_of_the_same_node():
    walks = _model().walks()
    assert [node.name for section in walks.values() for node in nodes_of(section)] == ["LLM"] * 3
    decode = walks["decode"]
    assert isinstance(decode, Loop)
    assert decode.max_iters == LoopLimit("decode_steps")
    partitions = _model().partitions().partitions
    assert [(p.name, p.walks, p.stream_fed) for p in partitions] == [("text", ("prefill", "decode", "embed"), False)]


def test_a_plan_counts_the_token_that_prefill_samples():
    model = _model()
    prompt = model.process_prompt(PromptRequest("native", token_ids=(5, 6)))
    plan = model.plan_walks(prompt, 16)
    assert plan.partitions[0].walks == ("prefill", "decode")
    assert plan.limits == {"decode_steps": 15}
    assert model.plan_walks(prompt, 1).limits == {"decode_steps": 0}


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.note | default('') }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer_dir(tmp_path):
    """A tokenizer of one token per character, with a template and two end tokens."""
    letters = {chr(code): code for code in range(1, 128)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    TokenizerFiles(tmp_path, 128, chat_template=TEMPLATE, eos_token_ids=(2, 9)).write_facts()
    return tmp_path


def _text(prompt) -> str:
    assert prompt.token_ids.dtype == np.int32
    return "".join(chr(token) for token in prompt.token_ids)


def test_prompts_of_every_kind(tokenizer_dir):
    model = _model(tokenizer_dir)
    assert _text(model.process_prompt(PromptRequest("completion", text="Hi there"))) == "Hi there"
    assert _text(model.process_prompt(PromptRequest("native", token_ids=(65, 66)))) == "AB"
    messages = (ChatMessage("system", "S"), ChatMessage("user", "U", {"note": "!"}))
    assert (
        _text(model.process_prompt(PromptRequest("chat", messages=messages)))
        == "<system>S<end><user>U!<end><assistant>"
    )
    begun = PromptRequest("chat", messages=(*messages, ChatMessage("assistant", "Be")), continue_final_message=True)
    assert _text(model.process_prompt(begun)) == "<system>S<end><user>U!<end><assistant>Be"


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (PromptRequest("native", token_ids=(1, 151)), "151"),
        (PromptRequest("native", token_ids=(-1,)), "-1"),
        (PromptRequest("native", token_ids=()), "empty"),
        (PromptRequest("completion", text=""), "empty"),
        (PromptRequest("chat", messages=()), "messages"),
    ],
)
def test_prompts_that_the_client_got_wrong(tokenizer_dir, request_, named):
    with pytest.raises(ValueError, match=named):
        _model(tokenizer_dir).process_prompt(request_)


def test_the_legal_neighbours_of_wrong_prompts(tokenizer_dir):
    model = _model(tokenizer_dir)
    assert model.process_prompt(PromptRequest("native", token_ids=(0, 150))).token_ids.tolist() == [0, 150]
    assert model.process_prompt(PromptRequest("completion", text=" ")).token_ids.tolist() == [32]


def test_words_without_a_tokenizer_are_the_clients_error():
    with pytest.raises(ValueError, match="token ids"):
        _model().process_prompt(PromptRequest("completion", text="hello"))


def test_no_chat_template_is_said(tokenizer_dir):
    facts = tokenizer_dir / "tokenizer_facts.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "chat_template": None}))
    with pytest.raises(ValueError, match="chat template"):
        _model(tokenizer_dir).process_prompt(PromptRequest("chat", messages=(ChatMessage("user", "U"),)))


def test_end_tokens_of_config_and_tokenizer_once_each(tokenizer_dir):
    assert list(_model(tokenizer_dir).stop_token_ids()) == [2, 9]
    assert list(_model().stop_token_ids()) == [2]


@pytest.fixture
def node() -> LlamaSubmodule:
    node = LlamaSubmodule(nn.Module())
    node.sampler = OddRowsStopAt7()
    return node


def test_prefill_asks_for_what_the_cache_lacks(node):
    batch = node.prepare_batch("prefill", row_columns([4, 2, 9], [0, 2, 3], [[10, 11], [20, 21, 22], [30, 31, 32, 33]]))
    assert batch.spans.tolist() == [2, 1, 1]
    assert batch.token_ids.tolist() == [10, 11, 22, 33]
    assert batch.spans.dtype == batch.token_ids.dtype == np.int32


def test_decode_asks_for_the_live_token(node):
    batch = node.prepare_batch("decode", row_columns([4, 2], [5, 6], [[1], [2]]))
    assert (batch.spans.tolist(), batch.token_ids.tolist()) == ([1, 1], [-1, -1])


def test_a_step_touches_every_resource_and_keeps_who_samples(node):
    kept = np.array([True, False])
    step = node.declare_step("prefill", Rows(np.array([1, 2]), np.array([3, 1])), kept)
    assert set(step.steps) == {"kv", "attn", "rope", "sampler"}
    assert isinstance(step.steps["sampler"], SamplerStep)
    assert step.steps["sampler"].kept is kept


@pytest.mark.parametrize(("walk", "loop"), [("prefill", None), ("decode", "decode")])
def test_stop_tokens_end_the_row_and_the_plan(node, walk, loop):
    columns = row_columns([1, 2, 3, 5], [1] * 4, [[1]] * 4)
    (decision,) = node.check_stop(walk, columns, {"token": np.array([7, 7, 8, 7])})
    assert decision.index.tolist() == [0, 3]
    assert (decision.loop, decision.finish) == (loop, True)
    assert node.check_stop(walk, columns, {"token": np.array([1, 7, 8, 9])}) == []


def test_decode_may_share_a_step_with_prefill(node):
    policy = node.get_chunking_policy("decode")
    assert policy is not None and policy.batch_with == ("prefill",) and not policy.chunked
    policy = node.get_chunking_policy("prefill")
    assert policy is not None and policy.chunked and policy.reuse_prefix and policy.recomputable
    assert [config.walk for config in node.get_cuda_graph_configs()] == ["decode", "prefill"]
