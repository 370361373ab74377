"""What models the Triton kernels serve: asked by the kernels themselves, and by backends before one is chosen. Any
process; imports nothing, since not every machine has Triton.
"""

from __future__ import annotations

MAX_HEAD_DIM = 256
MAX_GROUP = 64
"""Heads over one key-value head: a program holds the queries of all of them."""
DELTA_DIMS = (16, 32, 64, 128)
DELTA_TAPS = 4


def why_no_attention(num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
    """None: the attention kernels serve such heads."""
    if head_dim > MAX_HEAD_DIM:
        return f"heads of up to {MAX_HEAD_DIM}, not of {head_dim}"
    if (group := num_heads // num_kv_heads) > MAX_GROUP:
        return f"up to {MAX_GROUP} heads over one of keys and values, not {group}"
    return None


def why_no_delta(key_dim: int, value_dim: int, taps: int) -> str | None:
    """None: the kernel of the gated delta rule serves such heads and such a convolution."""
    if key_dim != value_dim or key_dim not in DELTA_DIMS:
        return f"keys and values of {', '.join(map(str, DELTA_DIMS))}, not of {key_dim} and {value_dim}"
    if taps != DELTA_TAPS:
        return f"convolutions of {DELTA_TAPS} taps, not of {taps}"
    return None
