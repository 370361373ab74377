"""How the media of one request go through the tower in steps, none much longer than a chunk of a prompt may be.

Several blocks make a step where media are small, the first with what comes before the blocks, the last with what comes
after. Where even one block is too much, it is divided: first parts of its patches become queries, keys and values, then
parts of the queries attend and go through the rest of the block; and so is what comes before and after. Pure
arithmetic, known to the declarations (which bound the loop) and to the node (which runs it). No torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from mstar.model.qwen3_5.config import VisionConfig

Grid = tuple[int, int, int]
"""Times, rows and columns of a medium."""

_PROJECTING = 0.25
"""What part of a block's products with weights are queries, keys and values."""

_EMBEDDING = 0.4
_MERGING = 0.25
"""What a patch costs before and after the blocks, in those of a block (bf16 on two AVX-512 cores)."""

_ATTENDING = 3
"""How much longer a product of attention takes than one with packed weights: in bf16 on two AVX-512 cores."""


class Blocks(NamedTuple):
    """Whole blocks over all patches."""

    blocks: range


class Part(NamedTuple):
    """Patches `begin:end` of one block are made queries, keys and values, or attend and go through the rest. Before the
    first block they are embedded, and after the last they become features, whole tokens each time."""

    block: int
    kind: Literal["embed", "project", "attend", "merge"]
    begin: int
    end: int


Work = Blocks | Part


class EncodePlan:
    """Of media with these `grids` (in tokens), which may be none. `budget`: patches times blocks of a step; a patch
    costs more in a large image, as it attends to all of it."""

    def __init__(self, grids: Sequence[Grid], tower: VisionConfig, budget: int) -> None:
        merged = tower.spatial_merge_size**2
        lengths = [height * width * merged for times, height, width in grids for _ in range(times)]
        self.depth = tower.depth
        self._merged = merged
        self.num_patches = sum(lengths)
        # Of a patch's products, attention to n patches is n / (6 hidden) of those with weights.
        rates = [1 + _ATTENDING * length / (6 * tower.hidden_size) for length in lengths]
        self._block_cost = sum(length * rate for length, rate in zip(lengths, rates, strict=True))
        self._per_step = self.depth
        self._embeds: list[Part] = []
        self._parts: list[Part] = []
        self._merges: list[Part] = []
        if self._block_cost > budget:
            self._embeds = self._evenly(0, "embed", _EMBEDDING, budget)
            self._parts = self._divide(lengths, rates, budget)
            self._merges = self._evenly(self.depth, "merge", _MERGING, budget)
        elif lengths:
            self._per_step = max(1, min(self.depth, int(budget // self._block_cost)))

    @property
    def divided(self) -> bool:
        return bool(self._parts)

    @property
    def num_steps(self) -> int:
        if self._parts:
            return len(self._embeds) + self.depth * len(self._parts) + len(self._merges)
        return -(-self.depth // self._per_step)

    def work(self, step: int) -> Work:
        """Of `step` < `num_steps`."""
        if self._parts:
            if step < len(self._embeds):
                return self._embeds[step]
            step -= len(self._embeds)
            if step >= self.depth * len(self._parts):
                return self._merges[step - self.depth * len(self._parts)]
            block, index = divmod(step, len(self._parts))
            return self._parts[index]._replace(block=block)
        steps = self.num_steps
        return Blocks(range(self.depth * step // steps, self.depth * (step + 1) // steps))

    def cost(self, step: int) -> int:
        """About what it computes, in the budget's units."""
        match self.work(step):
            case Blocks(blocks):
                return int(self._block_cost * len(blocks))
            case Part(kind="attend", begin=begin, end=end):
                return int(self._block_cost * (end - begin) / self.num_patches)
            case Part(kind=kind, begin=begin, end=end):
                return int({"embed": _EMBEDDING, "merge": _MERGING}.get(kind, _PROJECTING) * (end - begin))

    def _evenly(self, block: int, kind: Literal["embed", "project", "merge"], each: float, budget: int) -> list[Part]:
        """All patches, which cost `each`, in as few parts as the budget allows."""
        tokens = self.num_patches // self._merged
        count = min(tokens, -(-int(each * self.num_patches) // budget))
        borders = [tokens * index // count * self._merged for index in range(count + 1)]
        return [Part(block, kind, begin, end) for begin, end in pairwise(borders)]

    def _divide(self, lengths: Sequence[int], rates: Sequence[float], budget: int) -> list[Part]:
        patches = self.num_patches
        parts = self._evenly(0, "project", _PROJECTING, budget)
        # Borders where so much of the cost is behind: patches of one segment cost the same.
        rest = [rate - _PROJECTING for rate in rates]
        costs = list(accumulate((n * rate for n, rate in zip(lengths, rest, strict=True)), initial=0.0))
        firsts = list(accumulate(lengths, initial=0))
        count = int(-(-costs[-1] // budget))
        borders = [0]
        for index in range(1, count):
            at = costs[-1] * index / count
            segment = bisect_right(costs, at) - 1
            borders.append(firsts[segment] + int((at - costs[segment]) / rest[segment]))
        borders.append(patches)
        return parts + [Part(0, "attend", begin, end) for begin, end in pairwise(borders) if begin < end]
