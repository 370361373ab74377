"""Chunked prefill, prefix reuse, preemption, offload and overlap in every combination change no token.

Each cell of the grid runs the same requests; expected is what the plainest deployment gives to each request alone.
`make test` runs cells in which every pair of features meets, over some of the requests, `make test-full` all of it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.checkpoints import smollm2
from support.composite.deployment import Composite, Request, make_requests
from support.instance import Instance, Result, Tuning
from support.pressure_grid import ALL_CELLS, BASELINE, Cell, covering_cells, staggered
from support.smollm2_reference import Smollm2Reference
from support.token_parity import Draw, TokenCase, assert_equal_tokens

from mstar.communication.messages import SamplingParams
from mstar.model.base import ModelSetup, PreparedPrompt
from mstar.model.llama.model import NODE
from mstar.model.registry import build_model, build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext

FULL = bool(os.environ.get("MSTAR_TEST_FULL"))
CELLS = ALL_CELLS if FULL else covering_cells(2)
NUM_REQUESTS = 40
PAGE = 64
NUM_TOKENS = 12
TINY_PAGES = 6
DRAWS = {"temperature": 0.8, "top_k": 20}


@dataclass(frozen=True)
class Case:
    """A request of the language model; `draw` None: greedy."""

    ids: list[int]
    max_tokens: int
    draw: Draw | None

    @property
    def sampling(self) -> SamplingParams:
        if self.draw is None:
            return SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        return SamplingParams(
            temperature=self.draw.temperature, top_k=self.draw.top_k, seed=self.draw.seed, max_tokens=self.max_tokens
        )


def assert_at_baseline(instance: Instance) -> None:
    """Nothing of any request is left: pages are free or cached, on the host they are free."""
    for rank in range(len(instance.workers)):
        gauges = instance.gauges(rank)
        for name, value in gauges.items():
            if name in ("mstar_handles", "mstar_running_rows", "mstar_queue_depth", "mstar_tensors"):
                assert value == 0, f"worker {rank}: {name} is {value}"
            if name.startswith("mstar_pages") and 'state="owned"' in name:
                assert value == 0, f"worker {rank}: {name} is {value}"


class Smollm2:
    """The embedded model in fp32, in this process."""

    def __init__(self) -> None:
        self.reference = Smollm2Reference()
        checkpoint = smollm2()
        setup = ModelSetup(checkpoint.config(), None, 1024)
        self.model = build_model(find_card("llama"), setup)
        context = SubmoduleContext(setup, checkpoint, torch.float32, torch.device("cpu"))
        self.node = build_submodule(find_card("llama"), NODE, context)
        self.cases = self._cases()
        self.expected = self._alone()

    def instance(self, cell: Cell) -> Instance:
        page_bytes = 2 * 30 * PAGE * 3 * 64 * 4
        tuning = cell.tuning(
            page_size=PAGE, tiny_pages=TINY_PAGES, host_bytes=30 * page_bytes, max_seq_len=512, max_rows=8
        )
        return Instance(self.model, lambda _: self.node, {NODE: 0}, tuning)

    def submit(self, instance: Instance, index: int) -> Result:
        case = self.cases[index]
        return instance.submit(f"r{index}", PreparedPrompt(np.array(case.ids, np.int32)), case.sampling)

    def _cases(self) -> list[Case]:
        """Texts of 3 to 300 tokens. Many begin alike, for 150 tokens and more, and some are asked twice. Some end just
        below the end of their first page: together they need more than a tiny pool has."""
        rng = random.Random(11)
        encode = self.reference.encode
        words = ("sea", "clock", "bread", "road", "winter", "key", "number", "boat", "tree", "glass", "river", "song")
        common = encode("A list of things. " + " ".join(rng.choice(words) for _ in range(140)))
        lengths = (1, 8, 40, 120) if FULL else (1, 8, 40, 60)
        cases: list[Case] = []
        for index in range(NUM_REQUESTS if FULL else 12):
            text = encode(f"{index}. " + " ".join(rng.choice(words) for _ in range(rng.choice(lengths))))
            ids = cases[index // 2].ids if index % 7 == 6 else common + text if index % 2 else text
            if index % 7 < 5 and index % 3 == 0:
                ids = (text + common)[: PAGE - 3]
            draw = Draw(100 + index, **DRAWS) if index % 3 == 2 else None
            cases.append(Case(list(ids), rng.choice((1, 4, NUM_TOKENS)) if FULL else NUM_TOKENS, draw))
        return cases

    def _alone(self) -> list[list[int]]:
        expected: list[list[int]] = []
        instance = self.instance(BASELINE)
        for index in range(len(self.cases)):
            result = self.submit(instance, index)
            instance.run()
            expected.append(result.tokens)
        instance.close()
        return expected


@pytest.fixture(scope="module")
def language() -> Smollm2:
    return Smollm2()


@pytest.mark.network
@torch.no_grad()
@pytest.mark.both_cores
def test_what_one_request_gets_alone_is_what_transformers_says(language: Smollm2):
    """The grid's expectation is worth something."""
    greedy = [index for index, case in enumerate(language.cases) if case.draw is None][:2]
    cases = []
    for index in greedy:
        case = language.cases[index]
        (told,) = language.reference.greedy([case.ids], case.max_tokens)  # it stops at an end token, ours go on
        cases.append(TokenCase(case.ids, language.expected[index][: len(told)], told))
    assert_equal_tokens(cases, language.reference.last_logits)


@pytest.mark.network
@pytest.mark.both_cores
@pytest.mark.parametrize("cell", CELLS, ids=str)
@torch.no_grad()
def test_smollm2(language: Smollm2, cell: Cell):
    instance = language.instance(cell)
    indices = range(len(language.cases))
    results = staggered(instance, [lambda i=index: language.submit(instance, i) for index in indices], seed=3)
    assert [result.failure for result in results] == [None] * len(results)
    cases = [
        TokenCase(case.ids, result.tokens, expected, case.draw)
        for case, result, expected in zip(language.cases, results, language.expected, strict=True)
    ]
    assert_equal_tokens(cases, language.reference.last_logits)
    assert_at_baseline(instance)
    gauges = instance.gauges(0)
    if cell.prefix_cache and not cell.tiny:
        assert gauges["mstar_prefix_hit_tokens_total"] >= 2 * PAGE
    if not cell.prefix_cache:
        assert gauges.get("mstar_prefix_hit_tokens_total", 0) == 0
    if cell.chunk_pages == 1:
        assert max(len(step.walks) for step in instance.steps) >= 2, "no step has had chunks beside decoding rows"
    if cell.tiny:
        kinds = ["offload" if cell.offload else "recompute", *(["cached"] if cell.prefix_cache else [])]
        assert sum(gauges[f'mstar_evictions_total{{kind="{kind}"}}'] for kind in kinds) > 0, "the pool is not tiny"
    instance.close()


COMPOSITE_PAGE = 16


class SeededComposite:
    """Requests of the composite model: those of its own tests, greedy, and the same with seeds."""

    def __init__(self, composite: Composite) -> None:
        self.composite = composite
        self.requests: list[Request] = make_requests(NUM_REQUESTS if FULL else 16, seed=4)
        for index in range(5, len(self.requests), 6):
            self.requests[index] = self.requests[index - 5]  # asked again: media and prompt are cached
        self.drawn: list[list[int]] = []
        baseline = self.instance(BASELINE)
        for index in range(len(self.requests)):
            result = self.submit(baseline, index, seeded=True)
            baseline.run()
            self.drawn.append(result.tokens)
        baseline.close()

    def instance(self, cell: Cell) -> Instance:
        page_bytes = 2 * 2 * COMPOSITE_PAGE * 2 * 8 * 4
        tuning = cell.tuning(
            page_size=COMPOSITE_PAGE, tiny_pages=5, host_bytes=20 * page_bytes, max_seq_len=256, max_rows=8
        )
        return self.composite.instance("one_worker", tuning)

    def submit(self, instance: Instance, index: int, *, seeded: bool) -> Result:
        rid = f"{'s' if seeded else 'r'}{index}"
        request = self.requests[index]
        if not seeded:
            self.composite.submit(instance, rid, request)
            return instance.results[rid]
        sampling = SamplingParams(
            seed=index, max_tokens=request.max_tokens, stop_token_ids=request.stop_tokens, **DRAWS
        )
        return instance.submit(rid, self.composite.model.process_prompt(request.as_prompt()), sampling)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory) -> SeededComposite:
    return SeededComposite(Composite(tmp_path_factory.mktemp("composite")))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_composite(seeded: SeededComposite, cell: Cell):
    """Tokens, images and audio of greedy requests are the reference's; tokens of seeded ones those drawn alone."""
    instance = seeded.instance(cell)
    submits = [
        lambda i=index, s=with_seed: seeded.submit(instance, i, seeded=s)
        for index in range(len(seeded.requests))
        for with_seed in (False, True)
    ]
    staggered(instance, submits, seed=5)
    for index, request in enumerate(seeded.requests):
        seeded.composite.check(instance, f"r{index}", request)
        drawn = instance.results[f"s{index}"]
        assert drawn.failure is None
        assert drawn.tokens == seeded.drawn[index], f"{cell}: draws of request {index}"
    assert_at_baseline(instance)
    gauges = instance.gauges(0)
    if cell.prefix_cache and not cell.tiny:
        assert gauges["mstar_prefix_hit_tokens_total"] > 0
    if cell.tiny and cell.offload:
        assert gauges['mstar_evictions_total{kind="offload"}'] > 0
    instance.close()


def test_the_cells_cover_every_pair():
    for first in range(5):
        for second in range(first):
            pairs = {(cell[first], cell[second]) for cell in covering_cells(2)}
            assert pairs == {(cell[first], cell[second]) for cell in ALL_CELLS}
    assert len(ALL_CELLS) == 48
    assert Tuning().engine == {}, "a cell says what it changes"
