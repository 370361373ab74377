"""Tokens that a step's rows may draw, given between its forward and its draw."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from support.engine_rig import GREEDY, EngineRig, prompts, take
from support.sampler_rig import SamplerRig
from support.tiny_decoder import VOCAB

from mstar.communication.messages import SamplingParams
from mstar.engine.execution import AllowedTokens, Step
from mstar.engine.resources.logit_adjust import forbidden_tokens
from mstar.platforms.executor import ThreadedExecutor

WIDE = 75
"""A vocabulary that ends in the middle of a word of bits."""
SAMPLED = SamplingParams(temperature=1.3, seed=4, max_tokens=24, frequency_penalty=0.4, num_logprobs=2)


def bits(sets: Sequence[Iterable[int]], vocab: int = WIDE) -> np.ndarray:
    """One row of words per set, bit by bit."""
    words = np.zeros((len(sets), -(-vocab // 32)), np.uint32)
    for row, tokens in enumerate(sets):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words.view(np.int32)


def logits_of(seed: int, vocab: int = WIDE) -> torch.Tensor:
    return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def restricted(rig: SamplerRig, rows: dict[int, torch.Tensor], allowed: AllowedTokens) -> Step:
    rig.node.logits = torch.stack(list(rows.values()))
    step = rig.rig.arm(take("walk", list(rows)))
    rig.rig.engine.submit(step, draw_later=True)
    rig.rig.engine.draw(step, allowed)
    rig.rig.engine.finish(step)
    return step


def test_bits_are_read_in_order():
    sets = [{0}, {31, 32}, {74}, set(range(75))]
    assert (forbidden_tokens(bits(sets), WIDE) == [[token not in each for token in range(WIDE)] for each in sets]).all()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0, "seed": 1, "top_p": 0.9}])
def test_a_row_draws_what_it_would_if_the_others_were_impossible(params: dict):
    rig, plain = SamplerRig(WIDE), SamplerRig(WIDE)
    sets = {1: {3, 40, 74}, 4: set(range(30, 70))}
    adjusting = {"presence_penalty": 1.5, "bias_ids": (40,), "bias_values": (2.0,)}
    for each in (rig, plain):
        each.open(0, temperature=0.0)
        each.open(1, **params)
        each.open(2, seed=9)
        each.open(4, prompt=[33], **params, **adjusting)
    for seed in range(12):
        rows = {handle: logits_of(seed) for handle in (0, 1, 2, 4)}
        step = restricted(rig, rows, AllowedTokens(np.array([1, 3]), bits(list(sets.values()))))
        for handle, tokens in sets.items():
            rows[handle][[token not in tokens for token in range(WIDE)]] = -torch.inf
        drawn = plain.draw(rows)
        assert dict(zip(step.handles.tolist(), step.host("token").tolist(), strict=True)) == drawn
        assert all(drawn[handle] in each for handle, each in sets.items())
        assert rig.rig.sampler.live[1] == drawn[1]


def test_logprobs_are_those_before_the_restriction():
    rig = SamplerRig(WIDE)
    rig.open(0, temperature=0.0, num_logprobs=1)
    logits = logits_of(2)
    step = restricted(rig, {0: logits}, AllowedTokens(np.array([0]), bits([{7}])))
    assert step.host("token").tolist() == [7]
    assert step.outputs.logprobs is not None and (found := step.outputs.logprobs[0]) is not None
    assert found.logprob == pytest.approx(logits.log_softmax(0)[7].item(), abs=1e-5)
    assert found.top_ids == (int(logits.argmax()),)


def test_a_row_with_nothing_left_fails_alone():
    rig = SamplerRig(WIDE)
    for handle in range(2):
        rig.open(handle, temperature=float(handle), seed=1)
    step = restricted(rig, {0: logits_of(0), 1: logits_of(1)}, AllowedTokens(np.array([0]), bits([set()])))
    assert step.failed.keys() == {0} and "no token is left" in step.failed[0]


def generate(rig: EngineRig, handles: Sequence[int], later: bool) -> dict[int, list[int]]:
    """Each row may draw tokens of the parity opposite to its last one: known once that has been read."""
    texts = prompts(4, seed=3)
    for handle in handles:
        rig.open(handle, texts[handle], SAMPLED if handle % 2 else GREEDY)
    cur, walk = None, "prefill"
    for _ in range(9):
        nxt = rig.arm(take(walk, handles))
        walk = "decode"
        if later:
            rig.engine.submit(nxt, draw_later=True)
        if cur is not None:
            rig.end(cur)
        sets = [range(int(not rig.out[h][-1] % 2), VOCAB, 2) if rig.out[h] else range(VOCAB) for h in handles]
        if not later:
            rig.engine.submit(nxt, draw_later=True)
        rig.engine.draw(nxt, AllowedTokens(np.arange(len(handles)), bits(sets, VOCAB)))
        cur = nxt
    assert cur is not None
    rig.end(cur)
    return rig.out


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_the_forward_may_run_while_the_last_tokens_are_read(sizes: tuple[int, ...]):
    outputs = [
        generate(EngineRig(executor=executor, capture_sizes=sizes), (0, 1, 2), later)
        for executor, later in ((None, False), (None, True), (ThreadedExecutor(), True))
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    for tokens in outputs[0].values():
        assert all(one % 2 != other % 2 for one, other in itertools.pairwise(tokens))


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_a_step_draws_before_the_next_is_submitted(sizes: tuple[int, ...]):
    rig = EngineRig(capture_sizes=sizes)
    rig.open(0, prompts(1)[0])
    rig.prefill(0)
    step = rig.arm(take("decode", [0]))
    rig.engine.submit(step, draw_later=True)
    other = rig.arm(take("decode", [0]))
    for wrong in (lambda: rig.engine.submit(other), lambda: rig.engine.finish(step), lambda: rig.engine.draw(other)):
        with pytest.raises(RuntimeError):
            wrong()
    rig.engine.draw(step)
    with pytest.raises(RuntimeError):
        rig.engine.draw(step)
    rig.engine.submit(other)
    rig.end(step)
    rig.end(other)
    assert rig.out[0] == rig.decoder.reference_greedy(prompts(1)[0], 3)
    rig.close_all()


def test_what_the_forward_raised_is_the_steps_error():
    rig = EngineRig()
    rig.open(0, prompts(1)[0])
    step = rig.arm(take("prefill", [0]))
    rig.decoder.fail = [ValueError("no")]
    rig.engine.submit(step, draw_later=True)
    rig.engine.draw(step)
    rig.end(step)
    assert "ValueError: no" in step.failed[0]


def test_halves_of_a_step_that_ran_out_of_memory_keep_their_tokens():
    outputs = []
    runs: tuple[list[BaseException], ...] = ([], [MemoryError()])
    for failures in runs:
        rig = EngineRig()
        texts = prompts(4, seed=3)
        for handle in range(4):
            rig.open(handle, texts[handle], SAMPLED)
        step = rig.arm(take("prefill", range(4)))
        rig.decoder.fail = failures
        rig.engine.submit(step, draw_later=True)
        rig.engine.draw(step, AllowedTokens(np.array([0, 3]), bits([{5}, {6, 7}], VOCAB)))
        rig.end(step)
        outputs.append(rig.out)
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == [5] and outputs[0][3][0] in (6, 7)
