"""The embedded default model in process: chat prompts, greedy tokens against transformers on the same weights."""

import numpy as np
import pytest
import torch
from support.checkpoints import smollm2
from support.instance import Instance, Tuning
from support.token_parity import TokenCase, assert_equal_tokens
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mstar.communication.messages import SamplingParams
from mstar.model.base import ChatMessage, ModelSetup, PreparedPrompt, PromptRequest
from mstar.model.llama.model import NODE
from mstar.model.loader.tokenizer_files import load_tokenizer
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.loader.weights import iter_weights
from mstar.model.registry import build_model, build_submodule, card_for_config, find_card
from mstar.model.submodule_context import SubmoduleContext

pytestmark = pytest.mark.both_cores
QUESTIONS = ("What is the capital of France?", "Name three colours.")
MAX_TOKENS = 14


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    checkpoint = smollm2()
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(checkpoint, directory)
    assert card_for_config(checkpoint.config()) is find_card("llama")
    return build_model(find_card("llama"), ModelSetup(checkpoint.config(), directory, 512))


def _chat(question: str) -> PromptRequest:
    return PromptRequest("chat", messages=(ChatMessage("user", question),))


def test_its_facts_are_the_published_ones(model):
    config = model.config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.rope_theta, config.tie_word_embeddings, config.rms_norm_eps) == (100000.0, True, 1e-5)
    assert 2 in model.stop_token_ids()  # <|im_end|>


def _reference(checkpoint) -> LlamaForCausalLM:
    """transformers' model of the same dequantized weights; the loader's own tests compare those with transformers'."""
    config = LlamaConfig(**checkpoint.config())
    with torch.device("meta"):
        reference = LlamaForCausalLM(config)
    weights = {name: tensor.clone() for name, tensor in iter_weights(checkpoint, dtype=torch.float32)}
    reference.load_state_dict(weights, assign=True, strict=False)
    reference.tie_weights()
    reference.model.rotary_emb = LlamaRotaryEmbedding(config)
    assert not any(parameter.is_meta for parameter in reference.parameters())
    return reference.eval()


@torch.no_grad()
def test_greedy_tokens_equal_transformers(model):
    checkpoint = smollm2()
    context = SubmoduleContext(model.setup, checkpoint, torch.float32, torch.device("cpu"))
    node = build_submodule(find_card("llama"), NODE, context)
    instance = Instance(model, lambda _: node, {NODE: 0}, Tuning(max_seq_len=512, threaded=True))
    stops = list(model.stop_token_ids())
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=tuple(stops))
    prompts = [model.process_prompt(_chat(question)).token_ids.tolist() for question in QUESTIONS]
    results = [
        instance.submit(f"r{i}", PreparedPrompt(np.array(ids, np.int32)), sampling) for i, ids in enumerate(prompts)
    ]
    instance.run()
    instance.close()
    reference = _reference(checkpoint)
    cases = []
    for ids, result in zip(prompts, results, strict=True):
        tokens = torch.tensor([ids])
        out = reference.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=2,
        )
        cases.append(TokenCase(ids, result.tokens, out[0, len(ids) :].tolist()))
    assert_equal_tokens(cases, lambda ids: reference(torch.tensor([ids])).logits[0, -1])
    answer = load_tokenizer(model.setup.tokenizer_dir).decode(results[0].tokens)
    assert answer == "The capital of France is Paris."
    assert results[0].tokens[-1] in stops
    assert results[0].reasons == {"text": "stop"}
