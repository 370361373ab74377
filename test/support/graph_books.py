"""Tensor books that check every call: an id is put once, counted, and freed exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class CheckedBooks:
    """Implements `mstar.graph.protocol.TensorBooks`; each id stands for a value (an int)."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}
        self.counts: Counter[int] = Counter()
        self.num_put = 0

    def put(self, value: int) -> int:
        self.num_put += 1
        self.values[self.num_put] = value
        return self.num_put

    def retain(self, ids: Sequence[int]) -> None:
        for one in ids:
            assert one in self.values, f"id {one} retained after it was freed"
            self.counts[one] += 1

    def release(self, ids: Sequence[int]) -> list[int]:
        for one in ids:
            assert self.counts[one] > 0, f"id {one} released without a reference"
            self.counts[one] -= 1
        return [one for one in dict.fromkeys(ids) if not self.counts[one]]

    def free(self, ids: Sequence[int]) -> None:
        for one in ids:
            assert one in self.values, f"id {one} freed twice"
            assert not self.counts[one], f"id {one} freed with {self.counts[one]} references"
            del self.values[one]
