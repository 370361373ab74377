"""`EngineConfig`: what a deployment decides about an engine. Plain values; the composition root fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

AUTO_CAPTURE_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""Of a CPU. Dense, because a padding row costs a CPU what a real one does; not beyond, because there the Python that a
tape saves weighs little."""
AUTO_DEVICE_CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8))
"""Of an accelerator, where padding to the next multiple of 8 costs next to nothing; far, because launching every kernel
of a forward one by one takes longer than most forwards."""

AUTO_CAPTURE_TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Of packed rows, on an accelerator: launching one by one takes longer than the forward up to here."""
PACKED_ROWS = (4, 16, 64, 256)
"""Of a captured bucket of packed rows: padding rows have states and logits as others have."""

ENCODER_CACHE_BYTES = 256 << 20
"""Of a cache of media features that the deployment gives no size."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`capacity`: handles 0 to capacity - 1. `max_rows`: rows of one step at most. `dtype`: of weights, activations and
    caches, bf16 or fp32; logits and what the sampler computes are fp32.

    `resource_bytes`: memory for all resources (None: as much as they ask for). A cache is sized by `num_pages[key]`
    (pages that requests can own), or by `memory_fractions[key]` of what is left beside everything that has a size.
    Caches and pools of states without either share `cache_share` of the rest, `most_cache_bytes` at most: caches in
    proportion to their page size. Without a limit these have room for `max_rows` requests of `max_seq_len`.

    `backends[key]`: attention or linear attention backend of the deployment's choice. `capture_sizes`: rows of captured
    buckets for declarations that name none (empty: such walks run eagerly, at their exact size; None: the platform's
    sizes, see `auto_capture_sizes`). `capture_tokens`: tokens of captured buckets of packed rows, up to those of the
    longest step. With both empty nothing is captured.
    `stored_signals[node]`: sampled-token signals that must become tensors of the store because something other than the
    same node or the client receives them.

    `walk_inputs[node][walk]`: inputs that the walk's graph gives the node; nodes without an entry have no walks, so
    nothing of theirs is chunked, reused or computed again.

    `prefix_cache`: full pages of prompts are kept and reused; `reuse_generated`: pages of generated tokens too.
    `host_bytes[key]`: host memory that a cache, or a pool of states, may offload preempted requests to. `fingerprint`
    names the weights.

    A pool of recurrent states is sized by `num_slots[key]` (slots that requests and snapshots can own) or its fraction;
    pools with neither get half of what is shared, up to three slots for each of `max_rows`, and caches what is left of
    it. Snapshots are also made every `snapshot_interval` tokens of a prompt (0: only where it ends and where prompts
    part).

    `state_dtypes[key]`: of the wide blocks of a pool of recurrent states, fp32 without an entry.

    `max_bytes[key]`: what a cache of media features keeps for later requests (`ENCODER_CACHE_BYTES` without an entry).

    `debug_poison` makes what must not be read unreadable: padding and freed pages hold NaN, static outputs and output
    slots are overwritten as soon as they may be. `guard_outputs=False` hands out the step's own buffers instead of
    copies; only a test that shows why copies are needed wants that.
    """

    max_rows: int
    max_seq_len: int
    capacity: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_pages: Mapping[str, int] = field(default_factory=dict)
    num_slots: Mapping[str, int] = field(default_factory=dict)
    state_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    resource_bytes: int | None = None
    memory_fractions: Mapping[str, float] = field(default_factory=dict)
    cache_share: float = 1.0
    most_cache_bytes: int | None = None
    backends: Mapping[str, str] = field(default_factory=dict)
    capture_sizes: tuple[int, ...] | None = ()
    capture_tokens: tuple[int, ...] = ()
    stored_signals: Mapping[str, frozenset[str]] = field(default_factory=dict)
    walk_inputs: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    prefix_cache: bool = True
    reuse_generated: bool = False
    snapshot_interval: int = 0
    host_bytes: Mapping[str, int] = field(default_factory=dict)
    max_bytes: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    debug_poison: bool = False
    guard_outputs: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"models compute in bfloat16 or float32, not {self.dtype}")

    @property
    def captures_nothing(self) -> bool:
        return self.capture_sizes == () and not self.capture_tokens


def auto_capture_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Rows of captured buckets where neither declaration nor deployment names them, up to `max_rows`."""
    if config.device.type == "cpu":
        return AUTO_CAPTURE_SIZES
    most = min(config.max_rows, AUTO_DEVICE_CAPTURE_SIZES[-1])
    return tuple(sorted({most, *(size for size in AUTO_DEVICE_CAPTURE_SIZES if size <= most)}))


def packed_sizes(config: EngineConfig, chunk: int) -> list[tuple[int, int]]:
    """(rows, tokens) of captured buckets of packed rows. `chunk`: tokens that a step computes of a prompt even beside
    so many other rows that it gets longer than steps should be."""
    rows = sorted({min(size, config.max_rows) for size in PACKED_ROWS})
    sizes = set(config.capture_tokens)
    longest = config.max_rows - 1 + chunk
    if sizes and (most := max(sizes)) < longest:
        sizes |= {longest, *(size for size in AUTO_CAPTURE_TOKENS if most < size < longest)}
    return [(count, tokens) for tokens in sorted(sizes) for count in rows if count < tokens]
