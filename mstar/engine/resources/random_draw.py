"""One uniform number per (seed, draw index): the randomness of sampling, without any generator state.

Pure functions on host integers. The recipe is SplitMix64 (Steele, Lea, Flood 2014) used as a counter: the number
depends on the request's seed and on how many tokens it has drawn, never on batch, bucket, device or order of steps.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_GAMMA_64, _MIX_1_64, _MIX_2_64 = (np.uint64(value) for value in (_GAMMA, _MIX_1, _MIX_2))
_S27, _S30, _S31, _S41 = (np.uint64(shift) for shift in (27, 30, 31, 41))


def stream_key(seed: int, stream: int = 0) -> int:
    """Where a request's sequence of numbers begins, 64 bits. Neighbouring seeds get unrelated keys, and so do the
    samplers of one request (`stream`, 32 bits)."""
    z = (seed + _GAMMA + (stream << 32)) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def uniforms(keys: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Number `draws[i]` (from 0) of stream `keys[i]` (uint64): fp32 [rows], odd multiples of 2**-24 in (0, 1)."""
    z = keys + (draws.astype(np.uint64) + np.uint64(1)) * _GAMMA_64
    z = (z ^ (z >> _S30)) * _MIX_1_64
    z = (z ^ (z >> _S27)) * _MIX_2_64
    z ^= z >> _S31
    # 23 bits and a half: exact in fp32, and neither 0 nor 1.
    return ((z >> _S41).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
