"""Capture declarations: which walks of a node, or regions of its forward, run as replays over padded static buffers,
and at which sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class StaticInput(NamedTuple):
    """A tensor input of a captured walk or region: shape of one row or item, and its dtype by torch name
    (`"float32"`)."""

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


class RegionInputs(NamedTuple):
    """What a region computes with. `items[name]` `[items, ...]`, padding included where it is captured. Of packed items
    `starts` int32 [segments + 1]: items `starts[i] : starts[i + 1]` are segment i, which may be empty, and those behind
    the last are padding; `lengths`: of the segments, on the host, where there is no padding (None: captured)."""

    items: Mapping[str, Tensor]
    starts: Tensor | None = None
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PiecewiseConfig:
    """A region of a node's forward that is captured by itself, while what is around it runs eagerly: the node calls it
    by `NodeSubmodule.regions`. `run` makes a tensor with an entry for each item out of all `inputs`, and lets no
    item see the padding."""

    region: str
    run: Callable[[RegionInputs], Tensor]
    inputs: tuple[StaticInput, ...]


@dataclass(frozen=True, slots=True)
class PiecewiseBatchedConfig(PiecewiseConfig):
    """Items are rows of a step. Captured at the deployment's numbers of rows."""


@dataclass(frozen=True, slots=True)
class PiecewisePackedConfig(PiecewiseConfig):
    """Items lie in segments, one after the other. Captured at the deployment's numbers of tokens, up to `max_items`;
    beyond, and with more than `max_segments`, it runs eagerly."""

    max_items: int
    max_segments: int


class BucketKey(NamedTuple):
    """Identity of one captured graph. `q_len` is the number of tokens per row (1 for decode, 0: any number)."""

    walk: str
    bs: int
    num_tokens: int
    q_len: int
    cg_key_info: Hashable = None
