"""Greedy texts of whole deployments on an accelerator equal those of the CPU, whatever the deployment chooses."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.device_parity import MODELS, generate, open_instance, prompts, start, write_checkpoint

from mstar.engine.cuda_executor import CudaEvent, CudaExecutor
from mstar.engine.engine_config import EngineConfig
from mstar.launch import rank
from mstar.platforms.executor import Work

COUNT, TOKENS = 65, 10
VARIANTS: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"capture": {"enabled": False}},
    "plain loop": {"scheduler": {"async_scheduling": False}},
    "plain loop, eager": {"scheduler": {"async_scheduling": False}, "capture": {"enabled": False}},
    "in chunks": {"scheduler": {"max_step_tokens": 80}},
    "few rows": {"scheduler": {"max_rows": 7}, "capture": {"batch_sizes": [2, 5]}},
    "nothing reused": {"prefix_cache": {"enabled": False}},
    "in chunks, nothing reused, eager": {
        "scheduler": {"max_step_tokens": 80},
        "prefix_cache": {"enabled": False},
        "capture": {"enabled": False},
    },
}


class Tiny:
    """A checkpoint and what the CPU makes of the prompts."""

    def __init__(self, model: str, directory: Path) -> None:
        self.model = model
        self.directory = write_checkpoint(model, directory / model)
        self.prompts = prompts(COUNT)
        reference = self.open("cpu", prefix_cache={"enabled": False}, capture={"enabled": False})
        self.expected = generate(reference, self.prompts, TOKENS)
        self.sampled = generate(reference, self.prompts[:12], TOKENS, **SAMPLED)
        reference.close()

    def open(self, device: str = "cuda", **settings: Any) -> Any:
        return open_instance(self.model, self.directory, device, **settings)


SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.3}


@pytest.fixture(scope="module", params=MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What must not be read is NaN: freed pages and slots, padding, outputs that are done with."""
    plain = rank.engine_config

    def poisoning(*args: Any, **kwargs: Any) -> EngineConfig:
        return replace(plain(*args, **kwargs), debug_poison=True)

    monkeypatch.setattr(rank, "engine_config", poisoning)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A step whose launch waits for the device fails."""
    plain = CudaExecutor.submit

    def submit(self: CudaExecutor, work: Work) -> CudaEvent:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(self, work)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(CudaExecutor, "submit", submit)
    yield


@pytest.mark.parametrize("name", VARIANTS)
def test_texts_are_those_of_the_cpu(tiny: Tiny, name: str, poisoned: None):
    instance = tiny.open(**VARIANTS[name])
    assert generate(instance, tiny.prompts, TOKENS) == tiny.expected
    assert generate(instance, tiny.prompts[:20], TOKENS) == tiny.expected[:20]  # pages of the first are there
    instance.close()


def test_every_number_of_rows_gives_the_same_texts(tiny: Tiny):
    instance = tiny.open()
    for count in range(1, COUNT + 1):
        assert generate(instance, tiny.prompts[:count], 4) == [tokens[:4] for tokens in tiny.expected[:count]], count
    instance.close()


def test_a_step_is_one_replay(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    replays: list[int] = []
    plain = torch.cuda.CUDAGraph.replay

    def counting(self: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        plain(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counting)
    instance = tiny.open()
    generate(instance, tiny.prompts[:5], TOKENS)
    # Prompts in one step or, where states are kept in their middle, in two; rows that have ended once more.
    assert TOKENS <= len(replays) <= TOKENS + 2
    instance.close()


def test_no_launch_waits_for_the_device(tiny: Tiny, strict: None):
    instance = tiny.open()
    assert generate(instance, tiny.prompts[:9], TOKENS) == tiny.expected[:9]
    tokens = generate(instance, tiny.prompts[:9], TOKENS, num_logprobs=3, **SAMPLED)
    assert all(len(row) == TOKENS for row in tokens)
    instance.close()


def test_seeds_give_the_same_texts_as_on_the_cpu(tiny: Tiny):
    instance = tiny.open()
    tokens = generate(instance, tiny.prompts[:12], TOKENS, **SAMPLED)
    assert tokens == tiny.sampled
    mixed = start(instance, tiny.prompts[:6], TOKENS, **SAMPLED) + start(instance, tiny.prompts[6:12], TOKENS)
    instance.finish(mixed)
    assert [list(request.tokens["token"]) for request in mixed] == tiny.sampled[:6] + tiny.expected[6:12]
    instance.close()


def settle(instance: Any) -> None:
    """What was removed last leaves with the ticks that follow."""
    for _ in range(4):
        instance.tick()


def test_memory_comes_back(tiny: Tiny, poisoned: None):
    instance = tiny.open(prefix_cache={"enabled": False})
    engine = instance.workers[0][1].engine
    generate(instance, tiny.prompts, TOKENS)
    settle(instance)
    before, free = torch.cuda.memory_allocated(), engine.gauges()
    for _ in range(3):
        requests = start(instance, tiny.prompts, TOKENS)
        for _ in range(4):
            instance.tick()
        for request in requests[::2]:
            instance.remove(request)  # the others go on
        instance.finish(requests[1::2])
        texts = [list(request.tokens["token"]) for request in requests[1::2]]
        assert texts == tiny.expected[1::2]
    settle(instance)
    assert engine.gauges() == free
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    instance.close()


def test_bf16_texts_do_not_depend_on_capture(tiny: Tiny):
    """Two forwards over the same buffers, one recorded and one not: the same bits."""
    texts: list[list[list[int]]] = []
    for enabled in (True, False):
        capture = {"enabled": enabled, **({"batch_sizes": [1, 8]} if enabled else {})}
        backends = {"attn": {"backend": "triton"}, "delta": {"backend": "triton"}}
        backends = {key: value for key, value in backends.items() if key == "attn" or tiny.model == "qwen3_5"}
        instance = tiny.open(dtype="bfloat16", capture=capture, resources=backends)
        texts.append(generate(instance, tiny.prompts[:8], 24))
        instance.close()
    same = np.mean([one == other for one, other in zip(*texts, strict=True)])
    assert same == 1
