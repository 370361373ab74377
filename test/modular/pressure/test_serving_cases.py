"""Inputs that broke other servers where features meet: equal text with other media, penalties under overlap, prefills
arriving all the time. Expected outputs are those of a plain deployment, or of the reference."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from support.composite import reference
from support.composite.deployment import Composite, Request
from support.instance import Instance, Tuning
from support.tiny_serving import TinyLlama

PENALTIES: dict[str, Mapping[str, float]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.3},
    "all": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
}


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("llama"))


def media_of(num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, reference.MEDIA_WIDTH, generator=generator)


def cached_tokens(instance: Instance) -> float:
    return instance.gauges(0)["mstar_prefix_hit_tokens_total"]


@pytest.mark.parametrize("rows_b", [8, 4], ids=["equal size", "other size"])
@pytest.mark.parametrize("max_step_tokens", [16, 256], ids=["chunks", "whole"])
def test_the_same_text_with_other_media(composite: Composite, rows_b: int, max_step_tokens: int):
    """Media A, then B, then A: B takes nothing of A, the second A is found again."""
    latent = torch.zeros(reference.LATENT_ROWS, reference.LATENT_WIDTH)
    text = tuple(range(1, 41))
    requests = {
        "first": Request(media_of(8, seed=1), latent, text, 6),
        "other": Request(media_of(rows_b, seed=2), latent, text, 6),
        "again": Request(media_of(8, seed=1), latent, text, 6),
    }
    instance = composite.instance("one_worker", Tuning(max_step_tokens=max_step_tokens))
    found: dict[str, float] = {}
    for rid, request in requests.items():
        before = cached_tokens(instance)
        composite.submit(instance, rid, request)
        instance.run()
        composite.check(instance, rid, request)
        found[rid] = cached_tokens(instance) - before
    # 4 features and 40 tokens: two full pages of 16, the third has the last tokens.
    assert found == {"first": 0, "other": 0, "again": 32}
    assert instance.results["first"].tokens != instance.results["other"].tokens, "the media do not matter to the text"
    instance.close()


def test_media_of_two_requests_at_once(composite: Composite):
    """As above with all in the same steps, where pages of one could be taken for the other's."""
    latent = torch.zeros(reference.LATENT_ROWS, reference.LATENT_WIDTH)
    requests = {f"r{i}": Request(media_of(8, seed=i % 3), latent, tuple(range(1, 41)), 5) for i in range(9)}
    instance = composite.instance("one_worker", Tuning(max_step_tokens=48))
    for rid, request in requests.items():
        composite.submit(instance, rid, request)
        instance.tick()
    instance.run()
    for rid, request in requests.items():
        composite.check(instance, rid, request)
    assert cached_tokens(instance) > 0
    instance.close()


@pytest.mark.parametrize("params", PENALTIES.values(), ids=PENALTIES)
def test_penalties_with_overlap_on_and_off(llama: TinyLlama, params: Mapping[str, float]):
    """Counts are of tokens that were given out: no wasted step, chunk or recomputed token counts."""
    tokens: list[list[list[int]]] = []
    for tuning in (
        Tuning(overlap=False),
        Tuning(threaded=True),
        Tuning(late=True, max_step_tokens=16),
        Tuning(late=True, max_step_tokens=16, num_pages={"kv": 3}),
    ):
        instance = llama.instance(tuning)
        results = [
            llama.submit(instance, f"r{i}", llama.prompt(5 + 9 * i), max_tokens=40 - 2 * i, **params) for i in range(6)
        ]
        instance.run()
        assert [result.failure for result in results] == [None] * 6
        tokens.append([result.tokens for result in results])
        instance.close()
    assert tokens[1] == tokens[0]
    assert tokens[2] == tokens[0]
    assert tokens[3] == tokens[0]
    instance = llama.instance(Tuning())
    plain = llama.submit(instance, "plain", llama.prompt(5), max_tokens=40)
    instance.run()
    instance.close()
    assert plain.tokens != tokens[0][0], "the penalty changes nothing"


@pytest.mark.parametrize("overlap", [True, False], ids=["async", "plain"])
@pytest.mark.parametrize("max_step_tokens", [16, 40, 1000])
def test_many_prompts_with_prefills_arriving_all_the_time(llama: TinyLlama, overlap: bool, max_step_tokens: int):
    rng = random.Random(max_step_tokens)
    instance = llama.instance(Tuning(overlap=overlap, late=overlap, max_rows=24, max_step_tokens=max_step_tokens))
    prompts = [llama.prompt(rng.choice((1, 3, 12, 40, 90)), seed=index) for index in range(64)]
    results = []
    for index, prompt in enumerate(prompts):
        results.append(llama.submit(instance, f"r{index}", prompt, max_tokens=8))
        for _ in range(rng.randint(0, 3)):
            instance.tick()
    instance.run()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.failure is None
        assert result.tokens == llama.greedy(prompt, 8)
    instance.close()
