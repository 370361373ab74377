"""The node `Vision` on the engine's contract: media of several requests, each at its own place in the tower, in one
forward; and its weights. Workers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mstar.engine.step import EncodeStep, Rows, SubmoduleStep
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeOutputs, NodeSubmodule, RowColumns, StopDecision
from mstar.layers.encoded_media import EncodedMedia, PendingMedia
from mstar.layers.linear import pack_weights
from mstar.model.loader.load_rules import LoadRules, RenameRule
from mstar.model.loader.module_loading import load_weights
from mstar.model.loader.weights import iter_weights
from mstar.model.qwen3_5.config import Qwen35Config
from mstar.model.qwen3_5.encode_steps import blocks_of_step, num_encode_steps
from mstar.model.qwen3_5.media_rules import MediaRules
from mstar.model.qwen3_5.vision import Grid, VisionTower
from mstar.model.submodule_context import SubmoduleContext

WEIGHTS_PREFIX = "model.visual."


class VisionSubmodule(NodeSubmodule):
    """`pixels` uint8 [patches, values] of all media of a request, and from its second step on `hidden`, what the blocks
    so far made of those that are to be encoded → `hidden` and, with a row's last step, `features`.

    `budget`: patches times blocks that a step computes; of rows that do not fit beside others the step is put off.
    `loop` is ended for rows that need fewer steps than their plan allows, because some of their media are cached.
    """

    def __init__(self, tower: VisionTower, *, cache_key: str, loop: str, budget: int) -> None:
        super().__init__()
        self.tower = tower
        self.encoded = EncodedMedia(cache_key)
        self._loop = loop
        self._budget = budget
        self._per_token = tower.config.spatial_merge_size**2

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        """First come, first served; the first row always has its step."""
        spans = np.zeros(rows.handles.size, np.int32)
        left = self._budget
        for index, (patches, steps) in enumerate(self._work(rows)):
            step = int(rows.iterations[index])
            cost = patches * len(blocks_of_step(step, steps, self.tower.config.depth))
            if step >= steps or (cost > left and left < self._budget):
                spans[index] = -1
            else:
                left -= max(cost, 1)
        return NodeBatch(spans)

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        return SubmoduleStep({self.encoded.key: EncodeStep()}, rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        rows = self._media_rows(inputs)
        boundaries = sorted({border for row in rows for border in (row.blocks.start, row.blocks.stop)})
        for first, end in pairwise(boundaries):
            self._run(rows, range(first, end))
        ended = [row for row in rows if row.blocks.stop == self.tower.config.depth]
        if ended:
            features = self.tower.merge(torch.cat([row.hidden for row in ended]))
            sizes = [row.hidden.shape[0] // self._per_token for row in ended]
            for row, own in zip(ended, features.split(sizes), strict=True):
                row.features = list(own.split([medium.length for medium in row.media]))
        made = [feature for row in rows for feature in row.features]
        by_row = {row.index: row.hidden for row in rows if row not in ended}
        nothing = torch.empty(0, self.tower.config.hidden_size, dtype=self.tower.dtype, device=self._device)
        hidden = [by_row.get(index, nothing) for index in range(inputs.num_rows)]
        return {"hidden": hidden, "features": self.encoded(made)}

    def check_stop(self, graph_walk: str, rows: RowColumns, host_rows: Mapping[str, np.ndarray]) -> list[StopDecision]:
        last = np.array([steps for _, steps in self._work(rows)], np.int64) - 1
        ended = np.flatnonzero(rows.iterations >= last)
        return [StopDecision(ended, self._loop, finish=False)] if ended.size else []

    @property
    def _device(self) -> torch.device:
        return self.tower.pos_embed.weight.device

    def _work(self, rows: RowColumns) -> Iterator[tuple[int, int]]:
        """Of each row: patches to encode, and in how many steps."""
        for tokens in self.encoded.num_pending(rows.handles).tolist():
            patches = tokens * self._per_token
            yield patches, num_encode_steps(patches, self.tower.config.depth, self._budget)

    def _media_rows(self, inputs: EngineInputs) -> list[_MediaRow]:
        """Rows with something to encode, at their beginning of the step."""
        pending: dict[int, list[PendingMedia]] = {}
        for medium in self.encoded.pending():
            pending.setdefault(medium.row, []).append(medium)
        if not pending:
            return []
        pixels, hidden = _by_row(inputs, "pixels"), _by_row(inputs, "hidden")
        rows: list[_MediaRow] = []
        for index, media in pending.items():
            grids = [self._grid(medium) for medium in media]
            patches = sum(medium.length for medium in media) * self._per_token
            steps = num_encode_steps(patches, self.tower.config.depth, self._budget)
            blocks = blocks_of_step(media[0].step, steps, self.tower.config.depth)
            if media[0].step:
                x = hidden[index]
            else:
                x = self.tower.embed(torch.cat([self._pixels(pixels[index], medium) for medium in media]), grids)
            rows.append(_MediaRow(index, media, grids, blocks, x))
        return rows

    def _run(self, rows: Sequence[_MediaRow], blocks: range) -> None:
        active = [row for row in rows if row.blocks.start <= blocks.start and blocks.stop <= row.blocks.stop]
        if not active:
            return
        segments = self.tower.segments([grid for row in active for grid in row.grids])
        x = self.tower.run_blocks(torch.cat([row.hidden for row in active]), segments, blocks)
        for row, own in zip(active, x.split([row.hidden.shape[0] for row in active]), strict=True):
            row.hidden = own

    def _grid(self, medium: PendingMedia) -> Grid:
        merge = self.tower.config.spatial_merge_size
        times, height, width = medium.grid
        return times, height * merge, width * merge

    def _pixels(self, pixels: Tensor, medium: PendingMedia) -> Tensor:
        return pixels[medium.first * self._per_token : (medium.first + medium.length) * self._per_token]


class _MediaRow:
    """A row of the step while it is computed: `hidden` [patches, width] of its `media`, one after the other."""

    __slots__ = ("blocks", "features", "grids", "hidden", "index", "media")

    def __init__(self, index: int, media: list[PendingMedia], grids: list[Grid], blocks: range, hidden: Tensor) -> None:
        self.index = index
        self.media = media
        self.grids = grids
        self.blocks = blocks
        self.hidden = hidden
        self.features: list[Tensor | None] = [None] * len(media)


def build_vision(
    context: SubmoduleContext, config: Qwen35Config, *, cache_key: str, loop: str, budget: int
) -> VisionSubmodule:
    """The node with its weights loaded and packed. Raises `CheckpointError` for a checkpoint that does not fit."""
    if config.vision is None or context.checkpoint is None:
        raise ValueError("qwen3_5: there is no vision tower without a vision_config and a checkpoint")
    rules = MediaRules.read(context.setup.tokenizer_dir)
    tower = VisionTower(config.vision, rules.mean, rules.std, dtype=context.dtype, device="meta")
    weights = iter_weights(context.checkpoint, dtype=context.dtype, names=lambda name: name.startswith(WEIGHTS_PREFIX))
    load_weights(
        tower,
        ((name, _as_matrix(name, tensor)) for name, tensor in weights),
        LoadRules(renames=(RenameRule(WEIGHTS_PREFIX, ""),)),
        device=context.device,
        progress=context.progress,
    )
    pack_weights(tower)
    return VisionSubmodule(tower, cache_key=cache_key, loop=loop, budget=budget)


def _as_matrix(name: str, tensor: Tensor) -> Tensor:
    """A convolution whose stride is its kernel is a product with its flattened kernel."""
    return tensor.flatten(1) if name.endswith("patch_embed.proj.weight") else tensor


def _by_row(inputs: EngineInputs, name: str) -> Sequence[Tensor]:
    """An input as one tensor per row, whether its rows are alike or not."""
    if name in inputs.ragged:
        return inputs.ragged[name]
    return inputs.tensors[name].unbind(0) if name in inputs.tensors else ()
