"""A Qwen3.5 checkpoint with random weights, in the published layout: for tests and benchmarks on machines without a
hub. Runs in the process that makes it.

The weights are drawn so that what a trained model shows, this one shows as well: greedy texts differ between prompts
and do not collapse to one token, norms are not one, some heads of linear attention forget within a few tokens and some
remember thousands.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

from mstar.model.loader.checkpoint_writing import Draw, RandomTensor, write_random_weights
from mstar.model.loader.progress import LoadProgress
from mstar.model.loader.tokenizer_files import TOKENIZER_FILE
from mstar.model.loader.tokenizer_training import build_tokenizer
from mstar.model.qwen3_5.checkpoint_sizes import ADDED_TOKENS, SIZES, CheckpointSize

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""What the family's tokenizer takes for a word (from transformers' `Qwen3_5Tokenizer`)."""

TEMPLATE_FILE = "chat_template.jinja"


def write_random_checkpoint(size: str, directory: Path, *, seed: int, progress: LoadProgress | None = None) -> None:
    """Writes the checkpoint called `size` (a key of `SIZES`) into `directory`, which is made. Its tensors are drawn one
    block at a time. `config.json` comes last: a directory that has it is whole.

    Raises:
        ValueError: there is no such size, or the directory has files already.
    """
    shape = SIZES.get(size)
    if shape is None:
        raise ValueError(f"qwen3_5 has no size {size!r}; there are {', '.join(SIZES)}")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; give a directory that is, or a new one")
    config = shape.config()
    write_random_weights(directory, list(_tensors(config)), seed=seed, progress=progress)
    _write_text_side(shape, directory)
    if shape.vision:
        _write_processors(shape, config["vision_config"], directory)
    _write_json(directory / "config.json", config)


def _tensors(config: Mapping[str, Any]) -> Iterator[RandomTensor]:
    vision = config.get("vision_config")
    text = config["text_config"] if vision else config
    root = "model.language_model" if vision else "model"
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    # Small beside what the layers add: a tied embedding would otherwise repeat the last token forever. As an output
    # layer it gives logits with a deviation of 2, so that two best ones are rarely close.
    yield RandomTensor(f"{root}.embed_tokens.weight", (vocab, hidden), _normal(2 / math.sqrt(hidden)))
    for index, kind in enumerate(text["layer_types"]):
        yield from _layer(f"{root}.layers.{index}", text, kind)
    yield RandomTensor(f"{root}.norm.weight", (hidden,), _normal(0.3))
    if not text["tie_word_embeddings"]:
        yield RandomTensor("lm_head.weight", (vocab, hidden), _normal(2 / math.sqrt(hidden)))
    if vision:
        yield from _tower("model.visual", vision)
    if text["mtp_num_hidden_layers"]:
        yield from _next_token_predictor("mtp", text)


def _layer(name: str, text: Mapping[str, Any], kind: str) -> Iterator[RandomTensor]:
    hidden = text["hidden_size"]
    yield RandomTensor(f"{name}.input_layernorm.weight", (hidden,), _normal(0.3))
    if kind == "full_attention":
        yield from _attention(f"{name}.self_attn", text)
    else:
        yield from _delta_net(f"{name}.linear_attn", text)
    yield RandomTensor(f"{name}.post_attention_layernorm.weight", (hidden,), _normal(0.3))
    if "num_experts" in text:
        yield from _experts(f"{name}.mlp", text)
    else:
        yield from _feed_forward(f"{name}.mlp", hidden, text["intermediate_size"])


def _attention(name: str, text: Mapping[str, Any]) -> Iterator[RandomTensor]:
    hidden, dim = text["hidden_size"], text["head_dim"]
    num_heads, num_kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    yield _linear(f"{name}.q_proj", 2 * num_heads * dim, hidden)  # a query and a gate per head
    yield _linear(f"{name}.k_proj", num_kv_heads * dim, hidden)
    yield _linear(f"{name}.v_proj", num_kv_heads * dim, hidden)
    yield _linear(f"{name}.o_proj", hidden, num_heads * dim, gain=2)
    yield RandomTensor(f"{name}.q_norm.weight", (dim,), _normal(0.3))
    yield RandomTensor(f"{name}.k_norm.weight", (dim,), _normal(0.3))


def _delta_net(name: str, text: Mapping[str, Any]) -> Iterator[RandomTensor]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    key_width = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    value_width = heads * text["linear_value_head_dim"]
    channels, kernel = 2 * key_width + value_width, text["linear_conv_kernel_dim"]
    yield _linear(f"{name}.in_proj_qkv", channels, hidden)
    yield _linear(f"{name}.in_proj_z", value_width, hidden)
    yield _linear(f"{name}.in_proj_b", heads, hidden)
    yield _linear(f"{name}.in_proj_a", heads, hidden)
    yield RandomTensor(f"{name}.conv1d.weight", (channels, 1, kernel), _normal(1 / math.sqrt(kernel)))
    yield RandomTensor(f"{name}.A_log", (heads,), _log_of_uniform(0.5, 8.0), torch.float32)
    yield RandomTensor(f"{name}.dt_bias", (heads,), _time_step_bias)
    yield RandomTensor(f"{name}.norm.weight", (text["linear_value_head_dim"],), _normal(0.3, around=1.0), torch.float32)
    yield _linear(f"{name}.out_proj", hidden, value_width, gain=2)


def _feed_forward(name: str, hidden: int, width: int) -> Iterator[RandomTensor]:
    yield _linear(f"{name}.gate_proj", width, hidden)
    yield _linear(f"{name}.up_proj", width, hidden)
    yield _linear(f"{name}.down_proj", hidden, width, gain=2)


def _experts(name: str, text: Mapping[str, Any]) -> Iterator[RandomTensor]:
    hidden, count, width = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    yield _linear(f"{name}.gate", count, hidden, gain=2)  # apart, so that rounding seldom changes the choice
    yield RandomTensor(f"{name}.experts.gate_up_proj", (count, 2 * width, hidden), _normal(1 / math.sqrt(hidden)))
    yield RandomTensor(f"{name}.experts.down_proj", (count, hidden, width), _normal(2 / math.sqrt(width)))
    yield from _feed_forward(f"{name}.shared_expert", hidden, text["shared_expert_intermediate_size"])
    yield _linear(f"{name}.shared_expert_gate", 1, hidden)


def _next_token_predictor(name: str, text: Mapping[str, Any]) -> Iterator[RandomTensor]:
    """Published beside the model, for speculative decoding."""
    hidden = text["hidden_size"]
    yield _linear(f"{name}.fc", hidden, 2 * hidden)
    for index in range(text["mtp_num_hidden_layers"]):
        yield from _layer(f"{name}.layers.{index}", text, "full_attention")
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield RandomTensor(f"{name}.{norm}.weight", (hidden,), _normal(0.3))


def _tower(name: str, vision: Mapping[str, Any]) -> Iterator[RandomTensor]:
    hidden, width = vision["hidden_size"], vision["intermediate_size"]
    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    merged = hidden * vision["spatial_merge_size"] ** 2
    # Neighbouring pixels are alike, so their sum is larger than that of independent ones.
    yield RandomTensor(f"{name}.patch_embed.proj.weight", (hidden, *patch), _normal(1 / math.sqrt(math.prod(patch))))
    yield RandomTensor(f"{name}.patch_embed.proj.bias", (hidden,), _normal(0.2))
    yield RandomTensor(f"{name}.pos_embed.weight", (vision["num_position_embeddings"], hidden), _normal(0.5))
    for index in range(vision["depth"]):
        block = f"{name}.blocks.{index}"
        yield from _layer_norm(f"{block}.norm1", hidden)
        yield from _linear_with_bias(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from _linear_with_bias(f"{block}.attn.proj", hidden, hidden)
        yield from _layer_norm(f"{block}.norm2", hidden)
        yield from _linear_with_bias(f"{block}.mlp.linear_fc1", width, hidden)
        yield from _linear_with_bias(f"{block}.mlp.linear_fc2", hidden, width)
    yield from _layer_norm(f"{name}.merger.norm", hidden)
    yield from _linear_with_bias(f"{name}.merger.linear_fc1", merged, merged)
    yield from _linear_with_bias(f"{name}.merger.linear_fc2", vision["out_hidden_size"], merged)


def _linear(name: str, rows: int, columns: int, *, gain: float = 1.0) -> RandomTensor:
    """Output layers have a `gain` that makes up for the gate or the activation before them, which shrinks its input."""
    return RandomTensor(f"{name}.weight", (rows, columns), _normal(gain / math.sqrt(columns)))


def _linear_with_bias(name: str, rows: int, columns: int) -> Iterator[RandomTensor]:
    yield _linear(name, rows, columns)
    yield RandomTensor(f"{name}.bias", (rows,), _normal(0.2))


def _layer_norm(name: str, width: int) -> Iterator[RandomTensor]:
    yield RandomTensor(f"{name}.weight", (width,), _normal(0.2, around=1.0))
    yield RandomTensor(f"{name}.bias", (width,), _normal(0.2))


def _normal(deviation: float, *, around: float = 0.0) -> Draw:
    return lambda count, generator: torch.empty(count).normal_(around, deviation, generator=generator)


def _log_of_uniform(low: float, high: float) -> Draw:
    return lambda count, generator: torch.empty(count).uniform_(low, high, generator=generator).log_()


def _time_step_bias(count: int, generator: torch.Generator) -> torch.Tensor:
    """Time steps between 0.0005 and 0.5, evenly by magnitude, through the inverse of softplus."""
    steps = torch.empty(count).uniform_(math.log(0.0005), math.log(0.5), generator=generator).exp_()
    return steps.expm1_().log_()


def _write_text_side(size: CheckpointSize, directory: Path) -> None:
    tokenizer = build_tokenizer(size.num_tokens, ADDED_TOKENS, split=WORDS)
    tokenizer.save(str(directory / TOKENIZER_FILE))
    tokens = {
        str(size.token_id(text)): {
            "content": text,
            **dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False),
            "special": special,
        }
        for text, special in ADDED_TOKENS.items()
    }
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen3_5Tokenizer",
            "added_tokens_decoder": tokens,
            "additional_special_tokens": [],
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_prefix_space": False,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": size.config().get("text_config", size.config())["max_position_embeddings"],
        },
    )
    ends = [size.token_id("<|im_end|>"), size.token_id("<|endoftext|>")]
    _write_json(directory / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    with as_file(files("mstar.model.qwen3_5").joinpath(TEMPLATE_FILE)) as template:
        shutil.copyfile(template, directory / TEMPLATE_FILE)


def _write_processors(size: CheckpointSize, vision: Mapping[str, Any], directory: Path) -> None:
    patches = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    for file, kind, (least, most) in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}, size.image_pixels),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}, size.video_pixels),
    ):
        _write_json(directory / file, {"size": {"shortest_edge": least, "longest_edge": most}, **patches, **kind})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
