"""Greedy texts of whole deployments on an accelerator equal those of the CPU, whatever the deployment chooses."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.device_parity import DEVICE, MODELS, generate, open_instance, prompts, start, write_checkpoint

from mstar.engine.engine_config import EngineConfig
from mstar.launch import rank

COUNT, TOKENS, FEW = 65, 10, 3


def variant(captured: bool, overlapped: bool, chunked: bool, reused: bool) -> dict[str, Any]:
    """Settings of a deployment."""
    return {
        "capture": {"enabled": captured},
        "scheduler": {"async_scheduling": overlapped, "max_step_tokens": 80 if chunked else 512},
        "prefix_cache": {"enabled": reused},
    }


def named(captured: bool, overlapped: bool, chunked: bool, reused: bool) -> str:
    words = ("captured" if captured else "eager", "async" if overlapped else "plain loop")
    return ", ".join((*words, "in chunks" if chunked else "whole", "reused" if reused else "computed"))


GRID = {named(*choice): variant(*choice) for choice in product((True, False), repeat=4)}
FEW_ROWS = {"scheduler": {"max_rows": 7}, "capture": {"batch_sizes": [2, 5]}}


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

    def open(self, device: str = DEVICE, **settings: Any) -> Any:
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


@pytest.mark.parametrize("name", GRID)
def test_every_number_of_rows_gives_the_texts_of_the_cpu(tiny: Tiny, name: str, poisoned: None):
    instance = tiny.open(**GRID[name])
    assert generate(instance, tiny.prompts, TOKENS) == tiny.expected
    expected = [tokens[:FEW] for tokens in tiny.expected]
    for count in range(1, COUNT + 1):
        assert generate(instance, tiny.prompts[:count], FEW) == expected[:count], count
    instance.close()


def test_requests_that_come_and_go_one_by_one(tiny: Tiny, poisoned: None):
    """One more with every tick, until those that came first have ended: prompts beside any number of streams."""
    instance = tiny.open(scheduler={"max_step_tokens": 80})
    requests = []
    for index, prompt in enumerate(tiny.prompts):
        requests += start(instance, [prompt], 1 + index % TOKENS)
        instance.tick()
    instance.finish(requests)
    assert [list(request.tokens["token"]) for request in requests] == [
        tokens[: 1 + index % TOKENS] for index, tokens in enumerate(tiny.expected)
    ]
    instance.close()


def test_fewer_rows_than_requests(tiny: Tiny, poisoned: None):
    instance = tiny.open(**FEW_ROWS)
    assert generate(instance, tiny.prompts, TOKENS) == tiny.expected
    instance.close()


def test_many_short_prompts_in_one_replay(tiny: Tiny, poisoned: None):
    """More rows than any decode of the others has, in the widest bucket of packed rows."""
    rng = np.random.default_rng(11)
    short = [rng.integers(3, 140, int(rng.integers(1, 4)), dtype=np.int32) for _ in range(150)]
    instance, reference = (
        tiny.open(device, scheduler={"max_rows": 256}, capture={"enabled": device == DEVICE, "batch_sizes": [160]})
        for device in (DEVICE, "cpu")
    )
    tokens = sum(map(len, short))
    bucket = instance.workers[0][1].engine._nodes["LLM"].graphs.lookup_packed("prefill", None, len(short), tokens)
    assert DEVICE == "cpu" or (bucket is not None and bucket.key.bs == 256)
    assert generate(instance, short, FEW) == generate(reference, short, FEW)
    instance.close()
    reference.close()


def test_a_step_is_one_replay_and_a_random_choice_another(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    replays: list[int] = []
    plain = torch.cuda.CUDAGraph.replay

    def counting(self: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        plain(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counting)
    instance = tiny.open(prefix_cache={"enabled": False})
    for sampling, in_a_step in (({}, 1), ({"temperature": 0.9, "top_p": 0.9, "seed": 3}, 2)):
        replays.clear()
        generate(instance, tiny.prompts[:5], TOKENS, **sampling)
        # Prompts in one step or, where states are kept in their middle, in two; rows that have ended once more.
        assert TOKENS * in_a_step <= len(replays) <= (TOKENS + 2) * in_a_step
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


@pytest.mark.parametrize(
    ("tiny", "delta"), [("llama", "triton"), ("qwen3_5", "triton"), ("qwen3_5", "fla")], indirect=["tiny"]
)
def test_bf16_texts_do_not_depend_on_capture(tiny: Tiny, delta: str):
    """Two forwards over the same buffers, one recorded and one not: the same bits."""
    texts: list[list[list[int]]] = []
    for enabled in (True, False):
        capture = {"enabled": enabled, **({"batch_sizes": [1, 8]} if enabled else {})}
        backends = {"attn": {"backend": "triton"}, "delta": {"backend": delta}}
        backends = {key: value for key, value in backends.items() if key == "attn" or tiny.model == "qwen3_5"}
        instance = tiny.open(dtype="bfloat16", capture=capture, resources=backends)
        texts.append(generate(instance, tiny.prompts[:8], 24))
        instance.close()
    same = np.mean([one == other for one, other in zip(*texts, strict=True)])
    assert same == 1


BF16: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"capture": {"enabled": False}},
    "prompts by FlashInfer": {"capture": {"enabled": False}, "resources": {"attn": {"backend": "flashinfer"}}},
    "states in bf16": {"resources": {"state": {"num_slots": 200, "dtype": "bfloat16"}}},
}


@pytest.mark.parametrize(
    ("tiny", "how"),
    [(model, how) for how in BF16 for model in MODELS if model == "qwen3_5" or how != "states in bf16"],
    indirect=["tiny"],
)
def test_bf16_first_tokens_are_mostly_those_of_fp32(tiny: Tiny, how: str, poisoned: None):
    """By the backends that a deployment of bf16 gets by itself, in replays padded with NaN."""
    instance = tiny.open(dtype="bfloat16", prefix_cache={"enabled": False}, **BF16[how])
    rounds = [generate(instance, tiny.prompts, FEW) for _ in range(2)]
    assert rounds[0] == rounds[1]
    same = [ours[0] == theirs[0] for ours, theirs in zip(rounds[0], tiny.expected, strict=True)]
    assert np.mean(same) > 0.85
    instance.close()
