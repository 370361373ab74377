"""Qwen3.5 in the grid of features under pressure: recurrent states, pages and media give way to each other and come
back, and no token changes.

Expected is what the plainest deployment gives to each request alone.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.instance import Instance, Result
from support.pressure_grid import ALL_CELLS, BASELINE, Cell, covering_cells, staggered
from support.qwen3_5_instance import QwenInProcess
from support.qwen3_5_media import animation, chat, picture
from support.token_parity import Draw, TokenCase, assert_equal_tokens

from mstar.communication.messages import SamplingParams
from mstar.model.base import PreparedPrompt

FULL = bool(os.environ.get("MSTAR_TEST_FULL"))
CELLS = ALL_CELLS if FULL else covering_cells(2)
SIZES = ("tiny", "tiny-moe") if FULL else ("tiny",)
NUM_REQUESTS = 60 if FULL else 32
PAGE = 64
NUM_TOKENS = 16
TINY_PAGES, TINY_SLOTS = 6, 5
HOST_BYTES = {"kv": 4 << 20, "state": 1 << 20}
DRAWS = {"temperature": 0.8, "top_k": 20}
MEDIA = [
    ("image", picture(70, 90, 1)),
    ("image", picture(70, 90, 2)),
    ("image", picture(240, 130, 3)),
    ("image", picture(1, 1, 4)),
    ("video", animation(7, 64, 48, 5)),
]


@dataclass(frozen=True)
class Case:
    """`draw` None: greedy."""

    prompt: PreparedPrompt
    draw: Draw | None

    @property
    def sampling(self) -> SamplingParams:
        if self.draw is None:
            return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        return SamplingParams(
            temperature=self.draw.temperature, top_k=self.draw.top_k, seed=self.draw.seed, max_tokens=NUM_TOKENS
        )


class Pressed:
    """A checkpoint, requests, and what each comes to alone."""

    def __init__(self, directory: Path, size: str) -> None:
        self.qwen = QwenInProcess(directory, size, max_seq_len=512, max_step_patches=500)
        self.cases = self._cases()
        self.expected: list[list[int]] = []
        instance = self.instance(BASELINE)
        for index in range(len(self.cases)):
            result = self.submit(instance, index)
            instance.run()
            self.expected.append(result.tokens)
        instance.close()

    def _cases(self) -> list[Case]:
        """Texts of 1 to 270 tokens and chats with media, of which some differ in nothing but their pixels. Many begin
        alike, some are asked twice; some end just below the end of their first page, so that they grow out of it."""
        rng = random.Random(11)

        def drawn(count: int) -> list[int]:
            return [rng.randrange(5, 900) for _ in range(count)]

        common = drawn(150)
        cases: list[Case] = []
        for index in range(NUM_REQUESTS):
            if index % 8 == 7:
                prompt = cases[index // 2].prompt
            elif index % 4 == 1:
                media = [MEDIA[index // 4 % 2], *rng.sample(MEDIA[2:], rng.choice((0, 0, 1)))]
                prompt = self.qwen.model.process_prompt(chat(*media, "Look. " * rng.choice((5, 50))))
            elif index % 3 == 0:
                prompt = PreparedPrompt(np.array(drawn(PAGE - 3), np.int32))
            else:
                own = drawn(rng.choice((1, 8, 40, 120)))
                prompt = PreparedPrompt(np.array(common + own if index % 2 else own, np.int32))
            cases.append(Case(prompt, Draw(100 + index, **DRAWS) if index % 3 == 2 else None))
        return cases

    def instance(self, cell: Cell) -> Instance:
        return self.qwen.instance(
            cell.tuning(
                page_size=PAGE,
                tiny_pages=TINY_PAGES,
                host_bytes=HOST_BYTES,
                max_seq_len=512,
                max_rows=8,
                tiny_slots={"state": TINY_SLOTS},
            )
        )

    def submit(self, instance: Instance, index: int) -> Result:
        case = self.cases[index]
        return instance.submit(f"r{index}", case.prompt, case.sampling)

    def check(self, results: list[Result]) -> None:
        assert [result.failure for result in results] == [None] * len(results)
        for case, result, expected in zip(self.cases, results, self.expected, strict=True):
            ids = case.prompt.token_ids
            assert ids is not None
            compared = TokenCase(ids.tolist(), result.tokens, expected, case.draw)
            assert_equal_tokens([compared], lambda ids, p=case.prompt: self.qwen.reference.last_logits(p, ids))


@pytest.fixture(scope="module")
def pressed(tmp_path_factory):
    made: dict[str, Pressed] = {}

    def get(size: str) -> Pressed:
        if size not in made:
            made[size] = Pressed(tmp_path_factory.mktemp(size), size)
        return made[size]

    return get


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_what_one_request_gets_alone_is_what_transformers_says(pressed, size: str):
    """The grid's expectation is worth something."""
    one: Pressed = pressed(size)
    greedy = [index for index, case in enumerate(one.cases) if case.draw is None]
    assert any(one.cases[index].prompt.media for index in greedy)
    for index in greedy:
        prompt = one.cases[index].prompt
        assert prompt.token_ids is not None
        told = one.qwen.reference.generate(prompt, NUM_TOKENS, stops=())
        case = TokenCase(prompt.token_ids.tolist(), one.expected[index], told)
        assert_equal_tokens([case], lambda ids, p=prompt: one.qwen.reference.last_logits(p, ids))


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_qwen3_5(pressed, size: str, cell: Cell):
    one: Pressed = pressed(size)
    instance = one.instance(cell)
    indices = range(len(one.cases))
    results = staggered(instance, [lambda i=index: one.submit(instance, i) for index in indices], seed=3)
    one.check(results)
    gauges = instance.gauges(0)
    for name in ("mstar_handles", "mstar_running_rows", "mstar_queue_depth", "mstar_tensors"):
        assert gauges[name] == 0
    assert instance.held(0) == {}
    slots = {state: gauges[f'mstar_slots{{pool="state",state="{state}"}}'] for state in ("free", "live", "snapshot")}
    assert slots["live"] == 0
    if cell.tiny:
        assert sum(slots.values()) == TINY_SLOTS
        kinds = ["offload" if cell.offload else "recompute", *(["cached", "snapshot"] if cell.prefix_cache else [])]
        for kind in kinds:
            assert gauges[f'mstar_evictions_total{{kind="{kind}"}}'] > 0, "the pool is not tiny"
    if cell.prefix_cache:
        assert cell.tiny or gauges["mstar_prefix_hit_tokens_total"] >= 2 * PAGE
    else:
        assert slots["snapshot"] == gauges.get("mstar_prefix_hit_tokens_total", 0) == 0
    instance.close()
