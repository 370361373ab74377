"""Capture declarations: which walks of a node run as replays over padded static buffers, and at which sizes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple


class StaticInput(NamedTuple):
    """A tensor input of a captured walk: shape of one row, and its dtype by torch name (`"float32"`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class CudaGraphConfig:
    """`walk` is captured once per size. `cg_key_info` distinguishes variants of one walk. `static_inputs` lists every
    tensor input that its forward reads (tokens, positions and the like are the engine's)."""

    walk: str
    capture_batch_sizes: tuple[int, ...] | None = None
    cg_key_info: Hashable = None
    static_inputs: tuple[StaticInput, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchedCudaGraphConfig(CudaGraphConfig):
    """Decode-like: every row has exactly one token. None for `capture_batch_sizes`: the deployment's list."""


@dataclass(frozen=True, slots=True)
class PackedCudaGraphConfig(CudaGraphConfig):
    """Prefill-like: rows of any number of tokens, one after the other, captured at the deployment's numbers of tokens.
    Steps with tensor inputs run eagerly."""


class BucketKey(NamedTuple):
    """Identity of one captured graph. `q_len` is the number of tokens per row (1 for decode, 0: any number)."""

    walk: str
    bs: int
    num_tokens: int
    q_len: int
    cg_key_info: Hashable = None
