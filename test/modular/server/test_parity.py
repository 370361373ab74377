"""The running server on the real SmolLM2: greedy tokens under load as in transformers, seeded draws alone and in a
batch."""

import asyncio
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
import torch
from support.server import Server, running
from support.smollm2_reference import Smollm2Reference
from support.token_parity import TokenCase, assert_equal_tokens

pytestmark = [pytest.mark.network, pytest.mark.both_cores]
FULL = bool(os.environ.get("MSTAR_TEST_FULL"))
NUM_PROMPTS, NUM_TOKENS = (30, 64) if FULL else (20, 32)
QUESTIONS = ("What is the capital of France?", "What is 2 + 2?", "Say hello.", "Name one colour.", "Is water wet?")
TOPICS = ("the sea", "a clock", "bread", "an old road", "winter", "a lost key", "numbers", "paper boats", "a tall tree")


@pytest.fixture(scope="module")
def reference() -> Smollm2Reference:
    return Smollm2Reference()


@pytest.fixture(scope="module")
def prompts(reference) -> list[list[int]]:
    """Questions that end by themselves and texts that do not, of mixed lengths."""
    rng = random.Random(5)
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    for index in range(NUM_PROMPTS - len(texts)):
        words = " ".join(rng.choice(TOPICS) for _ in range(rng.randint(0, 40)))
        texts.append(f"{index}. {words} A story about {TOPICS[index % len(TOPICS)]}:")
    return [reference.encode(text) for text in texts]


@pytest.fixture(scope="module")
def expected(reference, prompts) -> list[list[int]]:
    with torch.no_grad():
        return reference.greedy(prompts, NUM_TOKENS)


class Started(NamedTuple):
    """`overlap`: a step is scheduled while the one before runs. The other server computes with one thread."""

    server: Server
    overlap: bool


@pytest.fixture(scope="module", params=[True, False], ids=["async", "plain"])
def started(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Started]:
    overlap: bool = request.param
    settings = ["dtype=float32", *([] if overlap else ["scheduler.async_scheduling=false", "num_threads=1"])]
    arguments = ["smollm2", *(word for setting in settings for word in ("--set", setting))]
    with running(arguments, tmp_path_factory.mktemp("log") / "log") as server:
        yield Started(server, overlap)
        assert server.stop() == 0


async def under_load(url: str, bodies: list[dict], spread_s: float, seed: int = 3) -> list[dict]:
    """The first choice of each, all asked at random times within `spread_s`."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=240) as client:

        async def ask(body: dict) -> dict:
            await asyncio.sleep(rng.uniform(0, spread_s))
            response = await client.post("/v1/completions", json={"model": "smollm2", **body})
            assert response.status_code == 200, response.text
            return response.json()

        return await asyncio.gather(*(ask(body) for body in bodies))


def row_ranges(server: Server) -> dict[float, float]:
    """Steps by the upper bound of their row-count range, of those that occurred."""
    gauges = server.gauges()
    below = sorted(
        (float(name.split('"')[1]), value)
        for name, value in gauges.items()
        if name.startswith("mstar_step_rows_bucket")
    )
    counts = {bound: value - before for (bound, value), (_, before) in zip(below, [(0.0, 0.0), *below], strict=False)}
    return {bound: count for bound, count in counts.items() if count}


@torch.no_grad()
def test_greedy_tokens_equal_transformers_under_random_arrivals(started: Started, reference, prompts, expected):
    server, overlap = started
    bodies = [{"prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 0} for ids in prompts]
    answers = asyncio.run(under_load(server.url, bodies, spread_s=2.0))
    # However slow the machine is, small batches occur too, and a row that stops alone.
    asked = [(index, NUM_TOKENS) for index in (*range(NUM_PROMPTS), 0)]
    answers += asyncio.run(under_load(server.url, bodies[:1], spread_s=0.0))
    for size in (1, 2, 4, 8):
        few = [(index, 16) for index in range(len(QUESTIONS), len(QUESTIONS) + size)]
        short = [bodies[index] | {"max_tokens": limit} for index, limit in few]
        answers += asyncio.run(under_load(server.url, short, spread_s=0.0))
        asked += few
    cases = []
    for (index, limit), answer in zip(asked, answers, strict=True):
        ids, wanted = prompts[index], expected[index][:limit]
        choice = answer["choices"][0]
        ours = reference.ids_of(choice["logprobs"]["tokens"], choice["finish_reason"], wanted)
        assert answer["usage"]["completion_tokens"] == len(ours)
        cases.append(TokenCase(ids, ours, wanted))
    accepted = assert_equal_tokens(cases, reference.last_logits)
    server.wait_for(server.is_idle, 3, "everything given back")
    ranges, gauges = row_ranges(server), server.gauges()
    print(f"accepted divergences: {accepted}; steps by rows: {ranges}")
    assert sum(count for bound, count in ranges.items() if bound > 8) > 0
    assert len(ranges) >= 5
    assert (gauges['mstar_steps_total{kind="abandoned"}'] > 0) == overlap
    assert (gauges['mstar_steps_total{kind="speculated"}'] > 0) == overlap


def test_a_seeded_text_is_the_same_alone_and_in_a_batch(started: Started, prompts):
    url = started.server.url
    bodies = [
        {"prompt": ids, "max_tokens": NUM_TOKENS // 2, "temperature": 1.0, "top_p": 0.9, "seed": 100 + index}
        for index, ids in enumerate(prompts[5:17])
    ]
    batch = asyncio.run(under_load(url, bodies, spread_s=0.2))
    alone = [asyncio.run(under_load(url, [body], spread_s=0.0))[0] for body in bodies[:4]]
    other = asyncio.run(under_load(url, [bodies[0] | {"seed": 7}], spread_s=0.0))[0]
    texts = [answer["choices"][0]["text"] for answer in batch]
    assert [answer["choices"][0]["text"] for answer in alone] == texts[:4]
    assert len(set(texts)) == len(texts)
    assert other["choices"][0]["text"] != texts[0]
