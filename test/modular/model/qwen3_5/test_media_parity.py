"""Greedy tokens of prompts with images and videos through real workers against transformers' `generate`: tower and
language model on one worker or on two, media that come again, towers and prompts in pieces."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.instance import Instance, Tuning
from support.qwen3_5_media import MediaReference, animation, chat, movie, picture
from support.token_parity import TokenCase, assert_equal_tokens

from mstar.communication.messages import SamplingParams
from mstar.model.base import ModelSetup, PreparedPrompt, PromptRequest
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.qwen3_5.model import ENCODER_CACHE, LANGUAGE, VISION
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint
from mstar.model.registry import build_model, build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext

CARD = find_card("qwen3_5")
MAX_SEQ_LEN = 512
MAX_TOKENS = 14
A, B = ("image", picture(70, 90, 1)), ("image", picture(70, 90, 2))
"""Of the same size, so only their pixels tell them apart."""
LARGE, DOT = ("image", picture(240, 130, 3)), ("image", picture(1, 1, 4))
GIF, MP4 = ("video", animation(7, 64, 48, 5)), ("video", movie(20, 96, 64, 6))
REQUESTS: list[PromptRequest] = [
    chat("What is the capital of France?"),
    chat("First ", A, " then ", B, " and again ", A, ": which are alike?"),
    chat(A, "What is this?"),
    chat(B, "What is this?"),
    chat(DOT),
    chat("Look at ", LARGE),
    chat("Compare ", GIF, " with ", MP4, " and this image ", B),
    chat(LARGE, DOT, A),
]
PLACEMENTS = {"together": {LANGUAGE: 0, VISION: 0}, "tower apart": {LANGUAGE: 0, VISION: 1}}


class Served:
    """A random checkpoint in our model and in transformers', and the requests with the latter's answers."""

    def __init__(self, directory) -> None:
        write_random_checkpoint("tiny", directory / "checkpoint", seed=5)
        checkpoint = resolve_checkpoint(str(directory / "checkpoint"), cache_dir=directory)
        write_tokenizer(checkpoint, directory / "tokenizer")
        self.setup = ModelSetup(checkpoint.config(), directory / "tokenizer", MAX_SEQ_LEN)
        self.checkpoint = checkpoint
        self.model = build_model(CARD, self.setup)
        self.reference = MediaReference(directory / "checkpoint", self.model.config.media)
        self.prompts: list[PreparedPrompt] = [self.model.process_prompt(request) for request in REQUESTS]
        stops = self.model.stop_token_ids()
        self.sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=tuple(stops))
        self.expected = [self.reference.generate(prompt, MAX_TOKENS, stops) for prompt in self.prompts]

    def instance(self, placement: str, tuning: Tuning, budget: int) -> Instance:
        setup = replace(self.setup, max_step_patches=budget)
        context = SubmoduleContext(setup, self.checkpoint, torch.float32, torch.device("cpu"))
        tuning = replace(tuning, max_seq_len=MAX_SEQ_LEN)
        model = build_model(CARD, setup)
        return Instance(model, lambda node: build_submodule(CARD, node, context), PLACEMENTS[placement], tuning)

    def submit(self, instance: Instance, index: int, rid: str | None = None) -> None:
        instance.submit(rid or f"r{index}", self.prompts[index], self.sampling)

    def check(self, instance: Instance, index: int, rid: str | None = None) -> None:
        result, prompt = instance.results[rid or f"r{index}"], self.prompts[index]
        assert result.failure is None, result.failure
        case = TokenCase(prompt.token_ids.tolist(), result.tokens, self.expected[index])
        assert_equal_tokens([case], lambda ids: self.reference.last_logits(prompt, ids))


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    with torch.no_grad():
        return Served(tmp_path_factory.mktemp("qwen"))


def encoded(instance: Instance, placement: str) -> tuple[float, float]:
    """Media that were found, and that were not."""
    gauges = instance.gauges(PLACEMENTS[placement][VISION])
    found, made = (
        gauges[f'mstar_encoder_cache_media_total{{cache="{ENCODER_CACHE}",result="{result}"}}']
        for result in ("hit", "miss")
    )
    return found, made


def assert_idle(instance: Instance) -> None:
    for rank in range(len(instance.workers)):
        held = instance.held(rank)
        assert not {name: value for name, value in held.items() if "live" in name or "owned" in name}, held
        assert instance.gauges(rank)["mstar_tensors"] == instance.gauges(rank)["mstar_handles"] == 0


def test_the_reference_sees_the_media(served: Served) -> None:
    """Otherwise equal answers would say nothing."""
    answers = [tuple(tokens) for tokens in served.expected]
    assert len(set(answers)) == len(answers)
    assert served.prompts[2].token_ids.tolist() == served.prompts[3].token_ids.tolist()


CASES = {
    "plain": ("together", Tuning(overlap=False), 2048),
    "apart": ("tower apart", Tuning(), 2048),
    "threaded, captured": ("together", Tuning(threaded=True, capture_sizes=(1, 3, 8)), 2048),
    "late, small steps": ("tower apart", Tuning(late=True, max_step_tokens=64), 100),
    "a part of a block at a time": ("together", Tuning(threaded=True, max_step_tokens=64), 30),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_all_at_once_and_all_again(served: Served, name: str) -> None:
    placement, tuning, budget = CASES[name]
    instance = served.instance(placement, tuning, budget)
    for index in range(len(REQUESTS)):
        served.submit(instance, index)
    instance.run()
    for index in range(len(REQUESTS)):
        served.check(instance, index)
    steps = [step for step in instance.steps if step.node == VISION]
    if budget > 100:
        assert max(len(step.rows) for step in steps) > 1, "media of several requests never shared a forward"
    else:
        assert len(steps) > len(REQUESTS)
    before, num_steps = encoded(instance, placement), len(steps)
    for index in (1, 6, 3):
        served.submit(instance, index, f"again{index}")
    instance.run()
    for index in (1, 6, 3):
        served.check(instance, index, f"again{index}")
    media = sum(len(served.prompts[index].media) for index in (1, 6, 3))
    assert encoded(instance, placement) == (before[0] + media, before[1])
    # What is cached takes one step, whatever its size.
    assert len([step for step in instance.steps if step.node == VISION]) <= num_steps + 3
    assert_idle(instance)
    instance.close()


@pytest.mark.parametrize("prefix_cache", [False, True])
@torch.no_grad()
def test_the_same_text_with_one_image_another_and_the_first_again(served: Served, prefix_cache: bool) -> None:
    """The token ids are equal: neither pages, states nor features may be mistaken."""
    instance = served.instance("together", Tuning(engine={"prefix_cache": prefix_cache}), 2048)
    for turn, index in enumerate((2, 3, 2, 3)):
        served.submit(instance, index, f"turn{turn}")
        instance.run()
        served.check(instance, index, f"turn{turn}")
    assert encoded(instance, "together") == (2, 2)
    instance.close()


@torch.no_grad()
def test_aborted_while_encoding(served: Served) -> None:
    instance = served.instance("tower apart", Tuning(threaded=True), 40)
    rng = np.random.default_rng(3)
    for turn in range(6):
        rids = [f"t{turn}.{index}" for index in (5, 6, 7, 1)]
        for index, rid in zip((5, 6, 7, 1), rids, strict=True):
            served.submit(instance, index, rid)
        for _ in range(int(rng.integers(1, 40))):
            instance.tick()
        for rid in rids[:3]:
            instance.abort(rid)
        instance.run()
        served.check(instance, 1, rids[3])
    assert_idle(instance)
    instance.close()
