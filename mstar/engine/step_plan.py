"""`StepPlan`: what the engine keeps with a step between `build` and `finish`. Internal to the engine.

Written on the loop thread up to `submit`; from then on the executor reads it and nobody writes it until the step ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mstar.engine.cuda_graph_runner import Bucket
from mstar.engine.staging import StagingLayout, StagingSlot, StepShape
from mstar.engine.step import Rows
from mstar.engine.step_inputs import Found
from mstar.engine.touched import Touched

NO_SHAPE = StepShape(0, 0, 0)
"""Of a step that is not planned yet."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """Copies made behind a step. `host`: by output signal. `resource_host`: what resources asked for. `stored`: outputs
    of the finished rows for the tensor store, stacked or by row (None: the row has none). `live`: signals that stay in
    the live column. `short_of_memory`: row ranges that did not fit even at half size."""

    host: Mapping[str, np.ndarray]
    resource_host: Mapping[str, np.ndarray]
    stored: Mapping[str, Tensor | Sequence[Tensor | None]]
    live: frozenset[str]
    short_of_memory: Sequence[tuple[int, int]]


class Accumulating(NamedTuple):
    """Outputs that are joined over the chunks of `rows` (int64, positions in the step), which begin at `begins` int32
    [rows of the step]."""

    signals: frozenset[str]
    rows: np.ndarray
    begins: np.ndarray


@dataclass(slots=True)
class StepPlan:
    """`token_ids` int32 [tokens] (-1: the row's live token) or None for a node without tokens; `token_columns`: the
    node's, as long. `live_only`: each row has one token, its live one. `restoring` bool [rows]: rows that read no
    inputs (None: no row). `finished` int64: positions of the rows whose run ends with the step (None: all). `shape` is
    padded; `bucket` is None for an eager step."""

    walk: str
    rows: Rows
    touched: list[Touched]
    token_ids: np.ndarray | None
    iterations: np.ndarray
    live_only: bool = False
    token_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    restoring: np.ndarray | None = None
    finished: np.ndarray | None = None
    accumulating: Sequence[Accumulating] = ()
    cg_key_info: Hashable = None
    bucket: Bucket | None = None
    shape: StepShape = NO_SHAPE
    layout: StagingLayout | None = None
    slot: StagingSlot | None = None
    found: Found = field(default_factory=dict)
    ranges: Sequence[tuple[int, int]] = ()
    """Rows of each forward; more than one where the node refuses to batch them."""
    done: StepDone | None = None
    """What the executor left behind."""

    @property
    def num_tokens(self) -> int:
        """Of the node's tokens; 0 for a node without."""
        return 0 if self.token_ids is None else self.token_ids.size
