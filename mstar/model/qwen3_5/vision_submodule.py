"""The node `Vision` on the engine's contract: media of several requests, each at its own place in the tower, in one
forward; and its weights. Workers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mstar.engine.cuda_graph_config import PiecewiseConfig, PiecewisePackedConfig, RegionInputs, StaticInput
from mstar.engine.step import EncodeStep, Rows, SubmoduleStep
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeOutputs, NodeSubmodule, RowColumns, StopDecision
from mstar.layers.encoded_media import EncodedMedia, PendingMedia
from mstar.layers.linear import pack_weights
from mstar.model.loader.load_rules import LoadRules, RenameRule
from mstar.model.loader.module_loading import load_weights
from mstar.model.loader.weights import iter_weights
from mstar.model.qwen3_5.config import Qwen35Config
from mstar.model.qwen3_5.encode_steps import Blocks, EncodePlan, Grid, Part, Work
from mstar.model.qwen3_5.media_rules import MediaRules
from mstar.model.qwen3_5.model import VISION_WEIGHTS
from mstar.model.qwen3_5.vision import Segments, VisionTower
from mstar.model.submodule_context import SubmoduleContext

ALL_BLOCKS = "blocks"
MOST_CAPTURED = 4096
"""Patches; launching the blocks of more of them one by one takes less time than computing them."""
MOST_SEGMENTS = 64


class VisionSubmodule(NodeSubmodule):
    """`pixels` uint8 [patches, values] of all media of a request, and from its second step on `hidden`, what the tower
    so far made of those that are to be encoded → `hidden` and, with a row's last step, `features`.

    `budget`: what a step computes, see `EncodePlan`; of rows that do not fit beside others the step is put off. `loop`
    is ended for rows that need fewer steps than their walk allows, because some of their media are cached.
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
        for index, plan in enumerate(self._plans(rows)):
            step = int(rows.iterations[index])
            cost = max(plan.cost(step), 1) if step < plan.num_steps else 0
            if not cost or (cost > left and left < self._budget):
                spans[index] = -1
            else:
                left -= cost
        return NodeBatch(spans)

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        return SubmoduleStep({self.encoded.key: EncodeStep()}, rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        rows = self._media_rows(inputs)
        whole = [row for row in rows if isinstance(row.work, Blocks)]
        borders = sorted({border for row in whole for border in (row.blocks.start, row.blocks.stop)})
        for first, end in pairwise(borders):
            self._run_blocks([row for row in whole if first in row.blocks], range(first, end))
        for row in rows:
            if isinstance(row.work, Part) and row.work.kind in ("project", "attend"):
                segments = self.tower.segments(row.grids, row.work.begin, row.work.end)
                row.hidden = self.tower.run_part(row.hidden, segments, row.work)
            elif isinstance(row.work, Part) and row.work.kind == "merge":
                row.hidden = self.tower.merge_part(row.hidden, row.work)
        self._merge([row for row in whole if row.ends])
        for row in rows:
            if row.ends and not isinstance(row.work, Blocks):
                row.divide(self.tower.merged(row.hidden))
        made = [feature for row in rows for feature in row.features]
        by_row = {row.index: row.hidden for row in rows if not row.ends}
        nothing = torch.empty(0, self.tower.config.hidden_size, dtype=self.tower.dtype, device=self._device)
        hidden = [by_row.get(index, nothing) for index in range(inputs.num_rows)]
        return {"hidden": hidden, "features": self.encoded(made)}

    def check_stop(self, graph_walk: str, rows: RowColumns, host_rows: Mapping[str, np.ndarray]) -> list[StopDecision]:
        last = np.array([plan.num_steps for plan in self._plans(rows)], np.int64) - 1
        ended = np.flatnonzero(rows.iterations >= last)
        return [StopDecision(ended, self._loop, finish=False)] if ended.size else []

    def get_piecewise_cuda_graph_configs(self) -> Sequence[PiecewiseConfig]:
        c = self.tower.config
        angles = (c.hidden_size // c.num_heads // 2,)
        inputs = (
            StaticInput("x", (c.hidden_size,), str(self.tower.dtype).removeprefix("torch.")),
            StaticInput("cos", angles, "float32"),
            StaticInput("sin", angles, "float32"),
        )
        return (PiecewisePackedConfig(ALL_BLOCKS, self._all_blocks, inputs, MOST_CAPTURED, MOST_SEGMENTS),)

    def _all_blocks(self, given: RegionInputs) -> Tensor:
        """`[patches, hidden]` that have gone through the tower."""
        x, cos, sin = (given.items[name] for name in ("x", "cos", "sin"))
        assert given.starts is not None
        places = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        segments = Segments(given.lengths, given.starts, places, cos, sin)
        return self.tower.run_blocks(x, segments, range(self.tower.config.depth))

    @property
    def _device(self) -> torch.device:
        return self.tower.pos_embed.weight.device

    def _plans(self, rows: RowColumns) -> Iterator[EncodePlan]:
        for grids in self.encoded.pending_grids(rows.handles):
            yield EncodePlan(grids, self.tower.config, self._budget)

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
            grids = [self._in_patches(medium.grid) for medium in media]
            plan = EncodePlan([medium.grid for medium in media], self.tower.config, self._budget)
            step = media[0].step
            work = plan.work(step)
            own = hidden[index] if step else None
            if own is None or (isinstance(work, Part) and work.kind == "embed"):
                sent = torch.cat([self._pixels(pixels[index], medium) for medium in media])
                own = (
                    self.tower.embed_part(own, sent, grids, work)
                    if isinstance(work, Part)
                    else self.tower.embed(sent, grids)
                )
            rows.append(_MediaRow(index, media, grids, work, step == plan.num_steps - 1, own))
        return rows

    def _run_blocks(self, rows: Sequence[_MediaRow], blocks: range) -> None:
        """Blocks that all these rows go through in this step."""
        segments = self.tower.segments([grid for row in rows for grid in row.grids])
        x = torch.cat([row.hidden for row in rows])
        if len(blocks) == self.tower.config.depth:
            assert segments.lengths is not None
            x = self.regions[ALL_BLOCKS]({"x": x, "cos": segments.cos, "sin": segments.sin}, segments.lengths)
        else:
            x = self.tower.run_blocks(x, segments, blocks)
        for row, own in zip(rows, x.split([row.hidden.shape[0] for row in rows]), strict=True):
            row.hidden = own

    def _merge(self, rows: Sequence[_MediaRow]) -> None:
        if not rows:
            return
        features = self.tower.merge(torch.cat([row.hidden for row in rows]))
        sizes = [row.hidden.shape[0] // self._per_token for row in rows]
        for row, own in zip(rows, features.split(sizes), strict=True):
            row.divide(own)

    def _in_patches(self, grid: Grid) -> Grid:
        merge = self.tower.config.spatial_merge_size
        return grid[0], grid[1] * merge, grid[2] * merge

    def _pixels(self, pixels: Tensor, medium: PendingMedia) -> Tensor:
        return pixels[medium.first * self._per_token : (medium.first + medium.length) * self._per_token]


class _MediaRow:
    """A row of the step while it is computed: `hidden` [patches, ...] of its `media`, one after the other; `grids` in
    patches. `ends`: with this step."""

    __slots__ = ("ends", "features", "grids", "hidden", "index", "media", "work")

    def __init__(
        self, index: int, media: list[PendingMedia], grids: list[Grid], work: Work, ends: bool, hidden: Tensor
    ) -> None:
        self.index = index
        self.media = media
        self.grids = grids
        self.work = work
        self.ends = ends
        self.hidden = hidden
        self.features: list[Tensor | None] = [None] * len(media)

    def divide(self, features: Tensor) -> None:
        """Those of the row's media, one after the other."""
        self.features = list(features.split([medium.length for medium in self.media]))

    @property
    def blocks(self) -> range:
        """Those that it goes through as a whole."""
        return self.work.blocks if isinstance(self.work, Blocks) else range(0)


def build_vision(
    context: SubmoduleContext, config: Qwen35Config, *, cache_key: str, loop: str, budget: int
) -> VisionSubmodule:
    """The node with its weights loaded and packed. Raises `CheckpointError` for a checkpoint that does not fit."""
    if config.vision is None or context.checkpoint is None:
        raise ValueError("qwen3_5: there is no vision tower without a vision_config and a checkpoint")
    rules = MediaRules.read(context.setup.tokenizer_dir)
    tower = VisionTower(config.vision, rules.mean, rules.std, dtype=context.dtype, device="meta")
    weights = iter_weights(context.checkpoint, dtype=context.dtype, names=lambda name: name.startswith(VISION_WEIGHTS))
    load_weights(
        tower,
        ((name, _as_matrix(name, tensor)) for name, tensor in weights),
        LoadRules(renames=(RenameRule(VISION_WEIGHTS, ""),)),
        device=context.device,
        progress=context.progress,
    )
    pack_weights(tower)
    tower.place_constants(context.device)
    return VisionSubmodule(tower, cache_key=cache_key, loop=loop, budget=budget)


def _as_matrix(name: str, tensor: Tensor) -> Tensor:
    """A convolution whose stride is its kernel is a product with its flattened kernel."""
    return tensor.flatten(1) if name.endswith("patch_embed.proj.weight") else tensor


def _by_row(inputs: EngineInputs, name: str) -> Sequence[Tensor]:
    """An input as one tensor per row, whether its rows are alike or not."""
    if name in inputs.ragged:
        return inputs.ragged[name]
    return inputs.tensors[name].unbind(0) if name in inputs.tensors else ()
