"""Sampling written once more, in plain Python and numpy over one row, from the published rules. Imports nothing of the
engine: tests compare the sampler with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

MASK = 2**64 - 1


def splitmix(state: int) -> int:
    """Output function of SplitMix64."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, draw: int) -> float:
    """Number `draw` of the stream of `seed`: its upper 23 bits, in the middle of their interval."""
    key = splitmix(seed + 0x9E3779B97F4A7C15)
    bits = splitmix(key + (draw + 1) * 0x9E3779B97F4A7C15) >> 41
    return (bits + 0.5) / 2**23


def choose(
    logits: Sequence[float] | np.ndarray,
    number: float,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """The token that `number` in (0, 1) selects."""
    values = np.asarray(logits, np.float64)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if temperature <= 1e-4:
        return order[0]
    weights = [math.exp((values[token] - values[order[0]]) / temperature) for token in order]
    if top_k:
        weights = weights[:top_k]
    total, kept, reached = sum(weights), 0, 0.0
    while kept < len(weights) and (kept == 0 or reached < top_p * total or top_p >= 1):
        reached += weights[kept]
        kept += 1
    kept = max(1, min(kept, sum(weight >= min_p for weight in weights)))
    target, reached = number * sum(weights[:kept]), 0.0
    for token, weight in zip(order[:kept], weights, strict=False):
        reached += weight
        if reached > target:
            return token
    return order[kept - 1]


def border_distance(
    logits: np.ndarray, number: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> float:
    """How far `number` may move before the token changes: below rounding, two right answers may differ."""
    same = choose(logits, number, temperature, top_k, top_p, min_p)
    for distance in (1e-7, 1e-6, 1e-5):
        for moved in (number - distance, number + distance):
            if choose(logits, min(max(moved, 1e-12), 1 - 1e-12), temperature, top_k, top_p, min_p) != same:
                return distance
    return 1e-4


def adjusted(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
    masked: Sequence[int] = (),
) -> np.ndarray:
    """Logits after penalties, bias and masks."""
    changed = np.array(logits, np.float64)
    for token in range(len(changed)):
        count = list(output).count(token)
        if count or token in prompt:
            changed[token] = changed[token] / repetition if changed[token] > 0 else changed[token] * repetition
        changed[token] -= frequency * count + presence * (count > 0)
        changed[token] += (bias or {}).get(token, 0.0)
    changed[list(masked)] = -np.inf
    return changed


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    return wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
