"""When two token sequences count as equal: the one comparer of every parity test.

GEMM results depend in their last bits on the number of rows, so two correct runs may part where two logits are as good
as equal. A first divergence is accepted if, teacher-forced in fp32, the two tokens' logits lie closer than `MAX_GAP`,
and if few sequences have one. Whatever is accepted is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

MAX_GAP = 1e-3
"""Of two logits that may be taken for one another."""
MAX_SHARE = 0.02
"""Of sequences with an accepted divergence; one is always allowed."""

LastLogits = Callable[[Sequence[int]], torch.Tensor]
"""Reference logits fp32 `[vocab]` after a token sequence."""


class TokenCase(NamedTuple):
    """`ours` and `expected` follow `prompt`; both include a stop token that ended them."""

    prompt: Sequence[int]
    ours: Sequence[int]
    expected: Sequence[int]


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
        gap = abs(float(logits[ours]) - float(logits[expected]))
        assert gap < MAX_GAP, f"{where}: {ours} instead of {expected}, their logits {gap:.2e} apart: {case}"
        print(f"{where}: {ours} instead of {expected}, accepted, logits {gap:.2e} apart")
        accepted += 1
    allowed = max(1, int(MAX_SHARE * len(cases)))
    assert accepted <= allowed, f"{accepted} of {len(cases)} sequences diverge, {allowed} may"
    return accepted
