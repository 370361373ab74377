"""Random Qwen3.5 checkpoints against transformers: names, shapes, processors, and texts that are not trivial."""

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from mstar.model.loader.checkpoint import ResolvedCheckpoint, resolve_checkpoint
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.loader.weights import iter_weights
from mstar.model.qwen3_5.checkpoint_sizes import ADDED_TOKENS, SIZES, published_config
from mstar.model.qwen3_5.random_checkpoint import WORDS, _tensors, write_random_checkpoint

TINY = ("tiny", "tiny-moe", "tiny-text")
PUBLISHED = tuple(size for size in SIZES if size not in TINY)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, ResolvedCheckpoint]:
    root = tmp_path_factory.mktemp("checkpoints")
    for size in TINY:
        write_random_checkpoint(size, root / size, seed=3)
    return {size: resolve_checkpoint(str(root / size), cache_dir=root) for size in TINY}


def model_class(config) -> type:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def load(checkpoint: ResolvedCheckpoint):
    kind = model_class(AutoConfig.from_pretrained(checkpoint.path))
    model, report = kind.from_pretrained(checkpoint.path, dtype=torch.float32, output_loading_info=True)
    return model.eval(), report


@pytest.mark.parametrize("size", TINY)
def test_transformers_loads_every_tensor(checkpoints, size: str):
    model, report = load(checkpoints[size])
    assert {name: list(found) for name, found in report.items() if found} == {}
    assert [type(model).__name__] == checkpoints[size].config()["architectures"]
    written = dict(iter_weights(checkpoints[size], dtype=torch.float32))
    state = model.state_dict()
    same = [name for name in state if name in written]
    assert len(same) == len([name for name in written if not name.startswith("mtp.")])
    assert all(torch.equal(state[name], written[name]) for name in same)


@pytest.mark.parametrize("size", SIZES)
def test_names_and_shapes_are_those_of_the_reference(tmp_path, size: str):
    config = SIZES[size].config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        state = model_class(parsed).from_config(parsed).state_dict()
    if parsed.tie_word_embeddings:
        del state["lm_head.weight"]
    made = {tensor.name: tensor.shape for tensor in _tensors(config) if not tensor.name.startswith("mtp.")}
    assert made == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_sizes_add_up_to_what_their_names_say():
    counts = {size: sum(math.prod(tensor.shape) for tensor in _tensors(SIZES[size].config())) for size in PUBLISHED}
    named = {"0.8b": 0.8, "2b": 2.0, "4b": 4.0, "9b": 9.0, "27b": 27.0, "35b-a3b": 35.0}
    assert {size: 1 < counts[size] / (named[size] * 1e9) < 1.2 for size in counts} == dict.fromkeys(named, True)
    assert round(counts["27b"] * 2 / 1e9, 2) == 55.56  # bytes of the published shards in bf16, prediction head included


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_ids_are_used_with_the_published_vocabulary(size: str):
    config = SIZES[size].config()
    assert config["text_config"]["vocab_size"] == 248_320
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    assert ids == {
        "image_token_id": 248_056,
        "video_token_id": 248_057,
        "vision_start_token_id": 248_053,
        "vision_end_token_id": 248_054,
    }
    known = {"<|endoftext|>": 248_044, "<|im_end|>": 248_046, "<tool_call>": 248_058, "</think>": 248_069}
    assert {text: SIZES[size].token_id(text) for text in known} == known


@pytest.mark.parametrize("size", TINY)
def test_the_tokenizer_has_the_ids_of_the_configuration(checkpoints, tmp_path, size: str):
    files = write_tokenizer(checkpoints[size], tmp_path)
    tokenizer = Tokenizer.from_file(str(files.tokenizer_path))
    assert {text: tokenizer.token_to_id(text) for text in ADDED_TOKENS} == {
        text: SIZES[size].token_id(text) for text in ADDED_TOKENS
    }
    assert files.vocab_size <= SIZES[size].vocab_size
    assert files.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
    assert not files.add_bos
    copied = {path.name for path in tmp_path.glob("*processor_config.json")}
    assert len(copied) == (0 if size == "tiny-text" else 2)
    assert all((tmp_path / name).read_text() == (checkpoints[size].path / name).read_text() for name in copied)
    reference = AutoTokenizer.from_pretrained(checkpoints[size].path)
    for text in ("I don't know: 12.5 kg!\n\n  naïve 你好 😀", "<|im_start|>user\n<think>a</think>", "x" * 50):
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(text, add_special_tokens=False)


def test_words_are_those_of_the_family():
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert WORDS == PRETOKENIZE_REGEX


@pytest.mark.parametrize("size", TINY)
def test_greedy_texts_are_not_trivial(checkpoints, size: str):
    model, _ = load(checkpoints[size])
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[size].path)
    texts = []
    for question in ("Hello", "What is the capital of France?", "1 2 3"):
        ids = tokenizer(question, return_tensors="pt").input_ids
        out = model.generate(
            ids, do_sample=False, max_new_tokens=16, eos_token_id=-1, output_logits=True, return_dict_in_generate=True
        )
        texts.append(out.sequences[0, ids.shape[1] :].tolist())
        logits = torch.stack(out.logits)[:, 0]
        assert 1 < logits.std() < 4
    assert all(len(set(text)) > 9 for text in texts)
    assert len({tuple(text[4:]) for text in texts}) == 3


def test_no_norm_is_one_and_heads_forget_at_different_speeds(checkpoints):
    weights = dict(iter_weights(checkpoints["tiny"], dtype=torch.float32))
    for name, tensor in weights.items():
        assert tensor.std() > 0.01, name
        if "layernorm.weight" in name or name.endswith(
            ("q_norm.weight", "k_norm.weight", "language_model.norm.weight")
        ):
            assert tensor.mean().abs() < 0.3, f"{name} is centred at zero"
        elif "norm" in name and name.endswith("weight") and not name.startswith("mtp"):
            assert 0.7 < tensor.mean() < 1.3, f"{name} is centred at one"
    rates = torch.cat([weights[n].exp() for n in weights if n.endswith("A_log")])
    steps = torch.nn.functional.softplus(torch.cat([weights[n] for n in weights if n.endswith("dt_bias")]))
    kept = torch.exp(-rates * steps)  # of the state, per token
    assert kept.max() > 0.99
    assert kept.min() < 0.8


def test_seeds(tmp_path):
    def digest(name: str, seed: int) -> bytes:
        write_random_checkpoint("tiny", tmp_path / name, seed=seed)
        return b"".join(file.read_bytes() for file in sorted((tmp_path / name).iterdir()))

    assert digest("a", 5) == digest("b", 5)
    assert digest("c", 6) != digest("a2", 5)


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"no size 'small'; there are tiny, tiny-moe, tiny-text, 0\.8b"):
        write_random_checkpoint("small", tmp_path / "a", seed=0)
    assert not (tmp_path / "a").exists()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        write_random_checkpoint("tiny", tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_published_configurations_by_hub_id():
    known = published_config("Qwen/Qwen3.5-9B@main")
    assert known == SIZES["9b"].config()
    assert published_config("Qwen/Qwen3.5-35B-A3B")["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    for other in ("Qwen/Qwen3.5-tiny", "Qwen/Qwen3-8B", "org/Qwen3.5-9B", "/some/path", ""):
        assert published_config(other) is None


@pytest.mark.parametrize("size", ["tiny", "tiny-moe"])
def test_processors_are_described_for_the_tower(checkpoints, size: str):
    path: Path = checkpoints[size].path
    vision = checkpoints[size].config()["vision_config"]
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        described = json.loads((path / file).read_text())
        assert described["patch_size"] == vision["patch_size"]
        assert described["temporal_patch_size"] == vision["temporal_patch_size"]
        assert described["merge_size"] == vision["spatial_merge_size"]
        assert described["size"]["shortest_edge"] < described["size"]["longest_edge"]
