"""What the conductor counts: numbers, cheap enough for every token. Front loop only; rendering is `api_server`'s."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

FIRST_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BOUNDS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """`counts[i]` observations in (bounds[i-1], bounds[i]]; the last entry is what lies above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Statistics:
    """Times in seconds. `outcomes` counts choices by how they ended: stop, length, or the code of the failure;
    `refusals` counts requests that were not taken on, by code."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
