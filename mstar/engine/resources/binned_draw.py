"""A draw over a whole vocabulary without sorting it: logits fall into bins, and only the bins that decide are sorted.

Host memory only (executor on a CPU). Gives the token that `mstar.engine.resources.token_choice` defines; a pass over
the vocabulary costs a tenth of a sort.
"""

from __future__ import annotations

import numpy as np

NUM_BINS = 4096
DEEPEST = 40.0
"""Weights under exp(-40) of the largest share the last bin: it is looked into about never."""


def draw_token(
    logits: np.ndarray, weights: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The token for one row: `logits` fp32 [vocab] with a finite maximum, `weights` fp32 [vocab] their
    exp((logit - largest) / temperature). `top_k` 0: no limit."""
    order = _BinnedOrder(logits, weights, temperature)
    num_kept = order.num_tokens if top_k == 0 else min(top_k, order.num_tokens)
    if top_p < 1:
        reached = order.first_reaching(np.float64(np.float32(top_p)) * order.mass_of(num_kept), strictly=False)
        num_kept = min(num_kept, reached + 1)
    if min_p > 0:
        num_kept = min(num_kept, int(np.count_nonzero(weights >= np.float32(min_p))))
    num_kept = max(num_kept, 1)
    rank = order.first_reaching(np.float64(np.float32(uniform)) * order.mass_of(num_kept), strictly=True)
    return order.token_at(min(rank, num_kept - 1))


class _BinnedOrder:
    """Tokens by falling logit and rising index, known bin by bin. Ranks count from 0."""

    def __init__(self, logits: np.ndarray, weights: np.ndarray, temperature: float) -> None:
        self.num_tokens = logits.size
        self._logits = logits
        self._weights = weights
        drop = logits.max() - logits
        deepest = min(float(drop[np.isfinite(drop)].max()), DEEPEST * temperature)
        scale = NUM_BINS / max(deepest, 1e-30)
        self._bins = np.minimum(drop * np.float32(min(scale, 1e30)), NUM_BINS - 1).astype(np.int32)
        self._counts = np.bincount(self._bins, minlength=NUM_BINS).cumsum()
        self._masses = np.bincount(self._bins, weights=weights, minlength=NUM_BINS).cumsum()
        self._sorted: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def mass_of(self, count: int) -> np.float64:
        """Weight of the first `count` tokens."""
        if count >= self.num_tokens:
            return self._masses[-1]
        at = int(np.searchsorted(self._counts, count))
        before = self._counts[at - 1] if at else 0
        return self._look(at)[1][count - before - 1]

    def first_reaching(self, mass: np.float64, *, strictly: bool) -> int:
        """Rank of the first token at which the summed weight reaches (`strictly`: exceeds) `mass`; at most the last."""
        side = "right" if strictly else "left"
        at = int(np.searchsorted(self._masses, mass, side=side))
        if at == NUM_BINS:
            return self.num_tokens - 1
        before = int(self._counts[at - 1]) if at else 0
        inside = int(np.searchsorted(self._look(at)[1], mass, side=side))
        return min(before + inside, int(self._counts[at]) - 1)

    def token_at(self, rank: int) -> int:
        at = int(np.searchsorted(self._counts, rank, side="right"))
        before = int(self._counts[at - 1]) if at else 0
        return int(self._look(at)[0][rank - before])

    def _look(self, at: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a bin in order, and the summed weight up to each."""
        if at not in self._sorted:
            tokens = np.flatnonzero(self._bins == at)
            tokens = tokens[np.argsort(-self._logits[tokens], kind="stable")]
            start = self._masses[at - 1] if at else np.float64(0)
            self._sorted[at] = tokens, start + self._weights[tokens].cumsum(dtype=np.float64)
        return self._sorted[at]
