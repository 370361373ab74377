"""`PiecewiseRegion`: a region of a node's forward, replayed over padded static buffers where a captured size holds its
items, and run as it is everywhere else.

Called by forwards on the executor; captured at start-up by `piecewise_capture`. Must not know what the region computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mstar.engine.cuda_graph_config import PiecewiseConfig, PiecewisePackedConfig, RegionInputs
from mstar.engine.device_graph import GraphMemory
from mstar.engine.graph_handle import GraphHandle


@dataclass(frozen=True, slots=True)
class RegionBucket:
    """The region at one size: `inputs` and `output` are the first `size` items of the region's buffers."""

    size: int
    inputs: RegionInputs
    output: Tensor
    graph: GraphHandle


class PiecewiseRegion:
    """See the module docstring. Its buckets share buffers as long as the largest, and run one after the other."""

    def __init__(self, declared: PiecewiseConfig) -> None:
        self.declared = declared
        self._max_segments = declared.max_segments if isinstance(declared, PiecewisePackedConfig) else 0
        self._sizes: list[int] = []
        self._buckets: list[RegionBucket] = []
        self._poison = False

    @property
    def sizes(self) -> Sequence[int]:
        """That have been captured, in ascending order."""
        return self._sizes

    def __call__(self, items: Mapping[str, Tensor], lengths: Sequence[int] = ()) -> Tensor:
        """`[items, ...]`, valid until the next call. `items`: all declared inputs; `lengths`: of the segments in which
        packed items lie, together all of them, none empty."""
        num_items = next(iter(items.values())).shape[0]
        bucket = self._lookup(num_items, len(lengths))
        if bucket is None:
            return self.declared.run(self._eager(items, lengths))
        for name, static in bucket.inputs.items.items():
            static[:num_items].copy_(items[name])
            if self._poison and static.is_floating_point():
                static[num_items:].fill_(float("nan"))
        if bucket.inputs.starts is not None:
            borders = [0, *accumulate(lengths)]
            borders += [num_items] * (self._max_segments + 1 - len(borders))
            bucket.inputs.starts.copy_(torch.tensor(borders, dtype=torch.int32), non_blocking=True)
        bucket.graph.replay()
        return bucket.output[:num_items]

    def capture(
        self,
        sizes: Sequence[int],
        memory: GraphMemory,
        device: torch.device,
        *,
        poison: bool,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """One bucket for each size, largest first, in place of what there was. `poison`: what is behind the real items
        is NaN in every call. `begin` is called before each. What the region raises comes out of here."""
        self._poison = poison
        self._sizes, self._buckets = [], []
        if not sizes:
            return
        largest = max(sizes)
        items = {
            item.name: torch.zeros((largest, *item.shape), dtype=getattr(torch, item.dtype), device=device)
            for item in self.declared.inputs
        }
        starts = torch.zeros(self._max_segments + 1, dtype=torch.int32, device=device) if self._max_segments else None
        output: Tensor | None = None
        for size in sorted(sizes, reverse=True):
            begin()
            inputs = RegionInputs({name: whole[:size] for name, whole in items.items()}, starts)
            if starts is not None:
                starts[1:] = size  # all of them in one segment
            if output is None:
                output = torch.empty_like(self.declared.run(inputs))
            self._add(size, inputs, output[:size], memory)

    def _add(self, size: int, inputs: RegionInputs, output: Tensor, memory: GraphMemory) -> None:
        def run() -> None:
            output.copy_(self.declared.run(inputs))

        graph = GraphHandle()
        graph.capture(run, memory)
        self._sizes.insert(0, size)
        self._buckets.insert(0, RegionBucket(size, inputs, output, graph))

    def _lookup(self, num_items: int, num_segments: int) -> RegionBucket | None:
        """The smallest bucket that holds them, or None."""
        at = bisect_left(self._sizes, num_items)
        if not num_items or at == len(self._sizes) or num_segments > self._max_segments:
            return None
        return self._buckets[at]

    def _eager(self, items: Mapping[str, Tensor], lengths: Sequence[int]) -> RegionInputs:
        if not self._max_segments:
            return RegionInputs(items)
        device = next(iter(items.values())).device
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
        return RegionInputs(items, starts, tuple(lengths))
