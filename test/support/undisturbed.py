"""What requests come to when nothing disturbs them: the prompt at once, one row alone. Tests that cut prompts or take
caches away compare with this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from support.engine_rig import EngineRig, prompts, take

from mstar.communication.messages import SamplingParams, TokenLogprobs
from mstar.engine.execution import Step

LONG = [(5 * i + 3) % 61 for i in range(23)]
TEXTS = [*prompts(6, seed=21, longest=30), LONG]
NUM_TOKENS = 5
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.9, seed=7, num_logprobs=2, max_tokens=24),
    SamplingParams(temperature=1.1, seed=8, top_k=9, presence_penalty=0.6, repetition_penalty=1.3, max_tokens=24),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, num_logprobs=1, max_tokens=24),
    SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=tuple(range(30)), max_tokens=24),
]

Logprobs = list[TokenLogprobs | None]


class Undisturbed(NamedTuple):
    """A request's tokens, what was asked about them, and the counts that its penalties saw (None: it has none)."""

    tokens: list[int]
    logprobs: Logprobs
    counts: list[int] | None


@cache
def undisturbed(text: int, params: int) -> Undisturbed:
    """`NUM_TOKENS` tokens of `TEXTS[text]` with `PARAMS[params]`."""
    rig = EngineRig()
    logprobs: dict[int, Logprobs] = {0: []}
    rig.open(0, TEXTS[text], PARAMS[params])
    for walk in ["prefill"] + ["decode"] * (NUM_TOKENS - 1):
        note_logprobs(rig.run(take(walk, [0])), logprobs)
    return Undisturbed(rig.out[0], logprobs[0], token_counts(rig, 0))


def assert_undisturbed(rig: EngineRig, cases: Sequence[tuple[int, int]], logprobs: Mapping[int, Logprobs]) -> None:
    """Request i of the rig is (text, params) `cases[i]`, and has come to what it comes to alone."""
    for handle, (text, params) in enumerate(cases):
        alone = undisturbed(text, params)
        assert rig.out[handle] == alone.tokens
        assert rig.sampler.columns.num_draws[handle] == NUM_TOKENS
        assert token_counts(rig, handle) == alone.counts
        assert len(logprobs[handle]) == NUM_TOKENS
        for a, b in zip(logprobs[handle], alone.logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.top_ids == b.top_ids
                np.testing.assert_allclose(a.logprob, b.logprob, atol=2e-4)
                np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, atol=2e-4)


def note_logprobs(step: Step, found: Mapping[int, Logprobs]) -> None:
    """Of the rows whose run ended with the step."""
    for row, handle in enumerate(step.handles.tolist()):
        if step.unfinished is None or not step.unfinished[row]:
            found[handle].append(None if step.outputs.logprobs is None else step.outputs.logprobs[row])


def token_counts(rig: EngineRig, handle: int) -> list[int] | None:
    row = int(rig.sampler._count_rows.of[handle])
    return rig.sampler._counts.output[row].tolist() if row else None
