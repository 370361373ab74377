"""Whole deployments on an accelerator beside the same on the CPU: tiny checkpoints, prompts and greedy texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.checkpoints import write_directory
from support.tiny_llama import Variant, build_reference

from mstar.communication.messages import MediaSpan, SamplingParams
from mstar.config.load import config_from_mapping
from mstar.kernels import ops
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance, LocalRequest
from mstar.model.base import PreparedPrompt
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA = Variant("device", {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64})
MODELS = ("llama", "qwen3_5")
SEEING = {"vision": "tiny", "vision, experts": "tiny-moe"}
"""Qwen3.5 with a tower: the sizes of `write_random_checkpoint`."""


def write_checkpoint(model: str, directory: Path) -> Path:
    """A tiny checkpoint with heads of 64, which every backend can serve."""
    if model == "llama":
        write_directory(directory, build_reference(LLAMA), max_shard_size="1GB")
        return directory
    write_random_checkpoint(SEEING.get(model, "tiny-text"), directory, seed=1)
    return directory


def open_instance(model: str, directory: Path, device: str, dtype: str = "float32", **settings: Any) -> LocalInstance:
    """`settings`: further keys of the configuration."""
    ops.select_kernels("torch")
    sizes = {"max_seq_len": 256, "num_threads": 2, "resources": {"kv": {"num_pages": 330}}}
    if model != "llama":
        model = "qwen3_5"
        sizes["resources"] = {**sizes["resources"], "state": {"num_slots": 200}}
    resources = {**sizes["resources"], **settings.pop("resources", {})}
    scheduler = {"max_rows": 65, "max_step_tokens": 512, **settings.pop("scheduler", {})}
    values = {"model": model, "checkpoint": str(directory), "device": device, "dtype": dtype, **sizes, **settings}
    config = config_from_mapping({**values, "resources": resources, "scheduler": scheduler}, "test")
    return LocalInstance(resolve_deployment(config, cache_dir=directory), calibrate=False)


def prompts(count: int, vocab_size: int = 140) -> list[np.ndarray]:
    """Of 1 to 150 tokens, ragged; every third begins with the same 70, so that pages are shared."""
    generator = np.random.default_rng(5)
    shared = generator.integers(3, vocab_size, 70, dtype=np.int32)
    found: list[np.ndarray] = []
    for index in range(count):
        length = int(generator.integers(1, 80)) if index % 8 else int(generator.integers(80, 150))
        own = generator.integers(3, vocab_size, length, dtype=np.int32)
        found.append(np.concatenate([shared, own]) if index % 3 == 0 else own)
    return found


def media_prompts(count: int, directory: Path) -> list[PreparedPrompt]:
    """Of one to three images each, of several sizes and random colours, between random text; some images come again."""
    config = json.loads((directory / "config.json").read_text())
    vision, token = config["vision_config"], config["image_token_id"]
    values = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    generator = np.random.default_rng(9)
    grids = [(1, 2, 3), (1, 4, 4), (1, 1, 1), (1, 6, 5), (1, 3, 7)]
    images = [
        generator.integers(0, 256, (4 * int(np.prod(grid)), values), np.uint8) for grid in grids for _ in range(3)
    ]
    found: list[PreparedPrompt] = []
    for _ in range(count):
        ids: list[int] = []
        spans: list[MediaSpan] = []
        chosen = generator.integers(0, len(images), int(generator.integers(1, 4))).tolist()
        for index in chosen:
            ids += generator.integers(3, 140, int(generator.integers(1, 30))).tolist()
            grid = grids[index // 3]
            spans.append(MediaSpan(len(ids), int(np.prod(grid)), bytes([index]) * 16, grid))
            ids += [token] * spans[-1].length
        ids += generator.integers(3, 140, int(generator.integers(1, 30))).tolist()
        pixels = np.concatenate([images[index] for index in chosen])
        found.append(PreparedPrompt(np.array(ids, np.int32), {"pixels": pixels}, media=tuple(spans)))
    return found


Text = np.ndarray | PreparedPrompt


def start(instance: LocalInstance, texts: Sequence[Text], max_tokens: int, **sampling: Any) -> list[LocalRequest]:
    """All at once; greedy unless `sampling` says otherwise, and without end tokens."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
    return [
        instance.submit(text if isinstance(text, PreparedPrompt) else PreparedPrompt(text), params) for text in texts
    ]


def generate(instance: LocalInstance, texts: Sequence[Text], max_tokens: int, **sampling: Any) -> list[list[int]]:
    """The tokens of each, in the order of `texts`."""
    requests = start(instance, texts, max_tokens, **sampling)
    instance.finish(requests)
    return [list(request.tokens["token"]) for request in requests]
