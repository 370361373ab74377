"""Captured walks: one `Bucket` per size, with static buffers of its own, and the look-up of the bucket for a step.

Look-ups on the loop thread, `replay` on the executor. A capture is a closure over static tensors; on a CPU replaying
means calling it, over the same padded buffers, so what padding can break shows there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mstar.engine.cuda_graph_config import BucketKey
from mstar.engine.output_ring import poison_tensor
from mstar.engine.staging import DeviceBlock, StagingLayout
from mstar.engine.step_inputs import Found
from mstar.engine.touched import Touched


class GraphHandle:
    """A forward over static buffers, recorded once."""

    def __init__(self) -> None:
        self._run: Callable[[], None] | None = None

    def capture(self, run: Callable[[], None]) -> None:
        """Run once, and keep it for `replay`. What `run` raises ends start-up."""
        run()
        self._run = run

    def replay(self) -> None:
        if self._run is None:
            raise RuntimeError("a graph is captured before it is replayed")
        self._run()


@dataclass(slots=True)
class Bucket:
    """`inputs` and `outputs`: static tensors `[bs, ...]` by name. `touched`: resources of the step being replayed."""

    key: BucketKey
    layout: StagingLayout
    block: DeviceBlock
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    live_signals: frozenset[str] = frozenset()
    touched: list[Touched] = field(default_factory=list)
    graph: GraphHandle = field(default_factory=GraphHandle)

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

    def add(self, bucket: Bucket) -> None:
        kind = (bucket.key.walk, bucket.key.cg_key_info)
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

    @property
    def num_buckets(self) -> int:
        return sum(map(len, self._buckets.values()))
