"""`NodeSubmodule`: the tensor half of a model's node, as the engine calls it.

The contract lives here, with the caller. `prepare_*`, `declare_step` and `check_stop` run on the worker's loop thread
on host integers; `forward*` run wherever the device executor runs and must be tensor in, tensor out: no host sync, no
data-dependent Python, no I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.cuda_graph_config import CudaGraphConfig, PiecewiseConfig
from mstar.engine.piecewise_region import PiecewiseRegion
from mstar.engine.step import Rows, SubmoduleStep


class RowColumns(NamedTuple):
    """What a node may know of its rows before a step; all host, one entry per row.

    `handles` int64. `lengths` int32: tokens in the row's cache; `num_prompt` int32: prompt tokens; `num_draws` int32:
    tokens sampled so far (`check_stop` sees the counts from before its step); `iterations` int32: innermost loop
    iteration; `finals` bool: the pass takes its stream's last chunk. `prompts`: the prompt ids, int32, by row (None
    where the request has none). `live`: input names whose value is the live column in every row.
    """

    handles: np.ndarray
    lengths: np.ndarray
    num_prompt: np.ndarray
    num_draws: np.ndarray
    iterations: np.ndarray
    finals: np.ndarray
    prompts: Sequence[np.ndarray | None]
    live: frozenset[str]


LIVE_TOKEN = -1
"""In `NodeBatch.token_ids` and `NodeInputs.token_ids`: read the row's live token."""


class NodeBatch(NamedTuple):
    """A node's wish for one step. `spans` int32 [rows]: tokens each row computes; a negative span declines the row for
    this step: its run goes no further, or there is no room for it beside the others (a row whose inputs are there and
    that is declined together with all others fails). `token_ids` int32 [sum of spans]: host ids, `LIVE_TOKEN` where the
    row's last sampled token is to be read (None: the node takes no tokens). `kept` bool [rows]: rows that sample (None:
    all). `token_columns`: more about each token, int32 [sum of spans] by name, from the node's `token_columns`; -1
    where nothing is given.

    In a chunked walk this is all that a row's cache lacks; the engine cuts, tokens and columns alike."""

    spans: np.ndarray
    token_ids: np.ndarray | None = None
    kept: np.ndarray | None = None
    token_columns: Mapping[str, np.ndarray] | None = None


class NodeInputs(NamedTuple):
    """One row's wish, for nodes without a columnar path: span, host token ids int32 [span] or None, samples or not;
    `token_columns` int32 [span] by name."""

    span: int = 0
    token_ids: np.ndarray | None = None
    kept: bool = True
    token_columns: Mapping[str, np.ndarray] | None = None


@dataclass(slots=True)
class EngineInputs:
    """What a forward receives; shapes include the bucket's padding rows.

    `tokens` int64 [tokens]: resolved ids (host ids, live column where asked). `last` int64 [rows]: index of each row's
    last token. `tensors[name]`: inputs stacked over rows `[rows, ...]`; inputs whose rows differ in shape, and
    lists (stream chunks `[items, ...]`, accumulated outputs), come in `ragged[name]` as one tensor per row instead (an
    empty one for a row that lacks an optional input or whose list is empty). Both are made when read.
    `iterations` int64 [rows]. `num_rows` is the number of real rows; in a captured forward that of the bucket.
    `token_columns[name]` int64 [tokens], for each of the node's `token_columns`.
    """

    num_rows: int
    tokens: torch.Tensor | None
    last: torch.Tensor | None
    tensors: Mapping[str, torch.Tensor]
    ragged: Mapping[str, Sequence[torch.Tensor]]
    iterations: torch.Tensor
    token_columns: Mapping[str, torch.Tensor] = field(default_factory=dict)


NodeOutputs = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
"""By signal: `[rows, ...]` stacked, or one tensor per row where shapes differ."""


@dataclass(frozen=True, slots=True)
class StopDecision:
    """`index` int [n]: positions in the rows given. `loop`: the loop that ends for them (None: none).
    `finish`: the partition has produced what was asked; walks still planned are skipped. They must not
    have nodes on other workers: the request fails otherwise."""

    index: np.ndarray
    loop: str | None
    finish: bool


class NodeSubmodule(nn.Module, ABC):
    """Base of every node. A stateless node implements `forward_batched` only.

    In a step of two parts (walks that `ChunkingPolicy.batch_with` lets share one) `prepare_*` and `check_stop` are
    called per part; `declare_step` and `forward_batched` once, with the walk of the last part, which has the prompts.
    Rows whose cache is being restored are not asked about; a step with one runs in the node's recomputable walk.
    """

    max_rows: int | None = None
    """Rows of one step at most, below the deployment's own limit; None: that alone."""

    token_columns: tuple[str, ...] = ()
    """Names of what the node knows of each token beside its id (`NodeBatch.token_columns`)."""

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch | None:
        """Columnar path. None: the engine asks `prepare_inputs` row by row."""
        return None

    def prepare_inputs(self, graph_walk: str, rows: RowColumns, index: int) -> NodeInputs | None:
        """One row; None declines it for this step (a fixed-length loop's extra step)."""
        return NodeInputs()

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep | None:
        """Resources this step touches; None for a stateless node."""
        return None

    def can_batch(self, graph_walk: str, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> bool:
        """Whether rows with these input shapes may share a forward; otherwise they run one after the other."""
        return True

    @abstractmethod
    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        """All rows of a step at once, padding included where the walk is captured."""

    def check_stop(self, graph_walk: str, rows: RowColumns, host_rows: Mapping[str, np.ndarray]) -> list[StopDecision]:
        """Host copies of the signals in `host_signals`, `[rows, ...]`: the only place where values are read there."""
        return []

    host_signals: frozenset[str] = frozenset()
    """Output signals copied to the host behind each step (small: tokens, stop flags)."""

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        """How the walk's inputs are cut into steps; None: not at all, and its rows share steps with no other walk's."""
        return None

    def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
        """Walks that are captured whole."""
        return ()

    def get_piecewise_cuda_graph_configs(self) -> Sequence[PiecewiseConfig]:
        """Regions of the forward, which calls them by `regions`."""
        return ()

    @cached_property
    def regions(self) -> Mapping[str, PiecewiseRegion]:
        """Declared regions by name, to call in a forward: replayed where the engine has captured them, at the size that
        holds the items."""
        return {declared.region: PiecewiseRegion(declared) for declared in self.get_piecewise_cuda_graph_configs()}
