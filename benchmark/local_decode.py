"""Prefill and decode rates of a whole engine in this process: the real worker loop on a loopback bus, no HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mstar import envs
from mstar.cli.targets import config_for
from mstar.communication.messages import SamplingParams
from mstar.config.load import config_from_mapping
from mstar.launch.deployment import Deployment, resolve_deployment
from mstar.launch.local import LocalInstance, LocalRequest
from mstar.model.base import PreparedPrompt
from mstar.model.loader.errors import CheckpointError
from mstar.platforms.executor import DeviceExecutor

RANDOM_WEIGHTS = "benchmark.random_llama:CARD"


class Rates(NamedTuple):
    """Tokens per second over all rows. Prefill: from the first tick until every row has a token; decode: all tokens
    after that. `first_tokens`: what each row began with, to compare with another engine's."""

    prefill_tok_s: float
    decode_tok_s: float
    prefill_s: float
    decode_s: float
    first_tokens: tuple[int, ...]


def open_smollm2(threads: int, max_rows: int, max_seq_len: int, overrides: Sequence[str] = ()) -> Deployment:
    """SmolLM2-135M from its checkpoint, or its shape with random weights if that cannot be fetched; caches just large
    enough."""
    pages = max_rows * -(-max_seq_len // 64) + 1
    sizes = [
        f"num_threads={threads}",
        f"max_seq_len={max_seq_len}",
        f"scheduler.max_rows={max_rows}",
        f"resources.kv.num_pages={pages}",
    ]
    found: Deployment | None = None
    for model in ("llama", RANDOM_WEIGHTS):
        config = config_from_mapping({"model": model}, model, [*sizes, *overrides])
        try:
            found = resolve_deployment(config, cache_dir=envs.CACHE_DIR.get())
            break
        except CheckpointError as error:
            print(f"no checkpoint ({error}); random weights instead")
    if found is None:
        raise RuntimeError("neither the checkpoint nor random weights can be used")
    return found


def open_target(
    target: str, threads: int, max_rows: int, max_seq_len: int, overrides: Sequence[str] = ()
) -> Deployment:
    """As `open_smollm2`, of anything that `mstar serve` takes."""
    if target == "smollm2":
        return open_smollm2(threads, max_rows, max_seq_len, overrides)
    sizes = [f"num_threads={threads}", f"max_seq_len={max_seq_len}", f"scheduler.max_rows={max_rows}"]
    pages = max_rows * -(-max_seq_len // 64) + 1
    config = config_for(target, [*sizes, f"resources.kv.num_pages={pages}", *overrides])
    return resolve_deployment(config, cache_dir=envs.CACHE_DIR.get())


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int, seed: int) -> np.ndarray:
    """int32 [num_prompts, num_tokens]"""
    return np.random.default_rng(seed).integers(100, vocab_size - 100, (num_prompts, num_tokens), dtype=np.int32)


class LocalDecoder:
    """One engine. `torch.set_num_threads` is the caller's."""

    def __init__(self, deployment: Deployment, executor: DeviceExecutor | None = None) -> None:
        torch.set_grad_enabled(False)
        self.instance = LocalInstance(deployment, executor=executor)

    def run(self, prompts: np.ndarray, output_tokens: int) -> Rates:
        """Decode `output_tokens` greedily after each row of `prompts` int32 [rows, tokens], all rows at once."""
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens)
        requests = [self.instance.submit(PreparedPrompt(prompt), sampling) for prompt in prompts]
        begin = time.perf_counter()
        while not all(request.tokens["token"] for request in requests):
            self._tick(requests)
        first = time.perf_counter()
        early = _num_tokens(requests)
        while not all(request.finished for request in requests):
            self._tick(requests)
        end = time.perf_counter()
        late = _num_tokens(requests) - early
        starts = tuple(request.tokens["token"][0] for request in requests)
        self.instance.finish(requests)
        return Rates(prompts.size / (first - begin), late / (end - first), first - begin, end - first, starts)

    def close(self) -> None:
        self.instance.close()

    def _tick(self, requests: Sequence[LocalRequest]) -> None:
        self.instance.tick()
        failed = [request.failure for request in requests if request.failure is not None]
        if failed:
            raise RuntimeError(f"a request failed: {failed[0]}")


def _num_tokens(requests: Sequence[LocalRequest]) -> int:
    return sum(len(request.tokens["token"]) for request in requests)
