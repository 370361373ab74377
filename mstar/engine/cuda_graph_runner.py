"""Captured walks: one `Bucket` per size, with static buffers of its own, and the look-up of the bucket for a step.

Look-ups on the loop thread, `replay` on the executor. On an accelerator a capture is one of its graphs; on a CPU a tape
of the compiled kernels or, with torch kernels, the closure itself. All run over the same padded static buffers, so
padding bugs show on a CPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mstar.engine.cuda_graph_config import BucketKey
from mstar.engine.graph_handle import GraphHandle
from mstar.engine.output_ring import poison_tensor
from mstar.engine.staging import DeviceBlock, StagingLayout
from mstar.engine.step_inputs import Found
from mstar.engine.touched import Touched


@dataclass(slots=True)
class Bucket:
    """`inputs` and `outputs`: static tensors `[bs, ...]` by name. `facts`: the plans of the resources that the capture
    was made with, by key."""

    key: BucketKey
    layout: StagingLayout
    block: DeviceBlock
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    live_signals: frozenset[str] = frozenset()
    facts: dict[str, Any] = field(default_factory=dict)
    graph: GraphHandle = field(default_factory=GraphHandle)

    def replays(self, touched: Sequence[Touched]) -> bool:
        """The step's plans ask for the forward that was captured."""
        return all(item.resource.capturable(item.facts, self.facts[item.resource.key]) for item in touched)

    def accepts(self, found: Found) -> bool:
        """The step brings every declared input, stacked, with the declared row shapes and dtypes."""
        return all(
            name in found and found[name].uniform and found[name].row_kind() == (static.shape[1:], static.dtype)
            for name, static in self.inputs.items()
        )

    def write_inputs(self, values: Mapping[str, Tensor], num_rows: int, *, poison: bool) -> None:
        """Fill the static inputs with real rows. Padding rows are zero; poisoned, floating ones are NaN, and what an
        earlier replay left in the outputs is gone."""
        for name, static in self.inputs.items():
            static[:num_rows].copy_(values[name])
            padding = static[num_rows:]
            if poison and padding.is_floating_point():
                padding.fill_(float("nan"))
            else:
                padding.zero_()
        if poison:
            for output in self.outputs.values():
                poison_tensor(output)


class GraphRunner:
    """The buckets of one node."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, Hashable], list[int]] = {}
        self._buckets: dict[tuple[str, Hashable], list[Bucket]] = {}
        self._packed: dict[tuple[str, Hashable], list[Bucket]] = {}

    def add(self, bucket: Bucket) -> None:
        kind = (bucket.key.walk, bucket.key.cg_key_info)
        if bucket.key.num_tokens and not bucket.key.q_len:
            packed = self._packed.setdefault(kind, [])
            packed.append(bucket)
            packed.sort(key=lambda each: (each.key.num_tokens, each.key.bs))
            return
        sizes = self._sizes.setdefault(kind, [])
        at = bisect_left(sizes, bucket.key.bs)
        sizes.insert(at, bucket.key.bs)
        self._buckets.setdefault(kind, []).insert(at, bucket)

    def lookup(self, walk: str, cg_key_info: Hashable, num_rows: int) -> Bucket | None:
        """The smallest bucket that holds the rows, or None."""
        kind = (walk, cg_key_info)
        sizes = self._sizes.get(kind)
        if sizes is None:
            return None
        at = bisect_left(sizes, num_rows)
        return self._buckets[kind][at] if at < len(sizes) else None

    def lookup_packed(self, walk: str, cg_key_info: Hashable, num_rows: int, num_tokens: int) -> Bucket | None:
        """The smallest bucket of packed rows that holds so many with so many tokens, or None."""
        for bucket in self._packed.get((walk, cg_key_info), ()):
            if bucket.key.num_tokens >= num_tokens and bucket.key.bs >= num_rows:
                return bucket
        return None

    @property
    def num_buckets(self) -> int:
        return sum(map(len, (*self._buckets.values(), *self._packed.values())))
