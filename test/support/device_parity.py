"""Whole deployments on an accelerator beside the same on the CPU: tiny checkpoints, prompts and greedy texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.checkpoints import write_directory
from support.tiny_llama import Variant, build_reference

from mstar.communication.messages import SamplingParams
from mstar.config.load import config_from_mapping
from mstar.kernels import ops
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance, LocalRequest
from mstar.model.base import PreparedPrompt
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint

LLAMA = Variant("device", {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64})
MODELS = ("llama", "qwen3_5")


def write_checkpoint(model: str, directory: Path) -> Path:
    """A tiny checkpoint with heads of 64, which every backend can serve."""
    if model == "llama":
        write_directory(directory, build_reference(LLAMA), max_shard_size="1GB")
        return directory
    write_random_checkpoint("tiny-text", directory, seed=1)
    return directory


def open_instance(model: str, directory: Path, device: str, dtype: str = "float32", **settings: Any) -> LocalInstance:
    """`settings`: further keys of the configuration."""
    ops.select_kernels("torch")
    sizes = {"max_seq_len": 256, "num_threads": 2, "resources": {"kv": {"num_pages": 330}}}
    if model == "qwen3_5":
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


def start(instance: LocalInstance, texts: Sequence[np.ndarray], max_tokens: int, **sampling: Any) -> list[LocalRequest]:
    """All at once; greedy unless `sampling` says otherwise, and without end tokens."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
    return [instance.submit(PreparedPrompt(text), params) for text in texts]


def generate(instance: LocalInstance, texts: Sequence[np.ndarray], max_tokens: int, **sampling: Any) -> list[list[int]]:
    """The tokens of each, in the order of `texts`."""
    requests = start(instance, texts, max_tokens, **sampling)
    instance.finish(requests)
    return [list(request.tokens["token"]) for request in requests]
