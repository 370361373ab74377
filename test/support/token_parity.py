"""When two token sequences count as equal: the one comparer of every parity test.

GEMM results depend in their last bits on the number of rows, so two correct runs may part where two logits are as good
as equal. A first divergence is accepted if, teacher-forced in fp32, the two tokens' logits lie closer than `MAX_GAP`
(for a seeded draw: if its number lies within `MAX_DISTANCE` of both tokens' share of the distribution), and if few
sequences have one. Whatever is accepted is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from support.sampling_reference import uniform

MAX_GAP = 1e-3
"""Of two logits that may be taken for one another."""
MAX_DISTANCE = 1e-4
"""Of a draw's number from the border between two tokens."""
MAX_SHARE = 0.02
"""Of sequences with an accepted divergence; one is always allowed."""

LastLogits = Callable[[Sequence[int]], torch.Tensor]
"""Reference logits fp32 `[vocab]` after a token sequence."""


class Draw(NamedTuple):
    """How a seeded sequence was drawn."""

    seed: int
    temperature: float
    top_k: int


class TokenCase(NamedTuple):
    """`ours` and `expected` follow `prompt`; both include a stop token that ended them. Greedy without `draw`."""

    prompt: Sequence[int]
    ours: Sequence[int]
    expected: Sequence[int]
    draw: Draw | None = None


def first_divergence(case: TokenCase) -> int | None:
    """Index of the first token that differs; None for equal sequences. One that is cut short differs at its end."""
    for index, (a, b) in enumerate(zip(case.ours, case.expected, strict=False)):
        if a != b:
            return index
    if len(case.ours) != len(case.expected):
        return min(len(case.ours), len(case.expected))
    return None


def assert_equal_tokens(cases: Sequence[TokenCase], last_logits: LastLogits) -> int:
    """Raises `AssertionError` naming the case; returns how many divergences were accepted."""
    accepted = 0
    for number, case in enumerate(cases):
        index = first_divergence(case)
        if index is None:
            continue
        where = f"case {number} (prompt of {len(case.prompt)}) at token {index}"
        both = index < min(len(case.ours), len(case.expected))
        assert both, f"{where}: {len(case.ours)} tokens, the reference has {len(case.expected)}: {case}"
        logits = last_logits([*case.prompt, *case.expected[:index]])
        ours, expected = int(case.ours[index]), int(case.expected[index])
        if case.draw is None:
            gap, most, what = abs(float(logits[ours]) - float(logits[expected])), MAX_GAP, "logits apart by"
        else:
            number = uniform(case.draw.seed, index)
            gap = max(_distance(logits, number, case.draw, token) for token in (ours, expected))
            most, what = MAX_DISTANCE, f"the number {number} off by"
        assert gap < most, f"{where}: {ours} instead of {expected}, {what} {gap:.2e}: {case}"
        print(f"{where}: {ours} instead of {expected}, accepted, {what} {gap:.2e}")
        accepted += 1
    allowed = max(1, int(MAX_SHARE * len(cases)))
    assert accepted <= allowed, f"{accepted} of {len(cases)} sequences diverge, {allowed} may"
    return accepted


def _distance(logits: torch.Tensor, number: float, draw: Draw, token: int) -> float:
    """How far `number` is from the part of (0, 1) that belongs to `token`; infinite for a token that has none."""
    values = logits.double().numpy()
    order = np.lexsort((np.arange(values.size), -values))[: draw.top_k or None]
    if token not in order:
        return float("inf")
    weights = np.exp((values[order] - values[order[0]]) / draw.temperature)
    ends = np.cumsum(weights) / weights.sum()
    place = int(np.flatnonzero(order == token)[0])
    begin = ends[place - 1] if place else 0.0
    return float(max(begin - number, number - ends[place], 0.0))
