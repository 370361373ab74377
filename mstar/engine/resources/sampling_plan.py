"""What one step asks of the sampler: which of its rows need more than an argmax, as host columns.

Loop thread. A step of plain greedy rows has an empty plan and costs an argmax; every feature names only its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mstar.engine.device_graph import DeviceGraph
from mstar.engine.resources.random_draw import uniforms
from mstar.engine.resources.sampling_columns import BIAS, COUNT, CUT, LOGPROBS, MASS, SAMPLE, SamplingColumns

_FEW = 256
_SLACK = 64


class RowGroup:
    """Rows that share a need: `rows` int64 are positions in the step (rising), `columns` what the need takes."""

    __slots__ = ("columns", "rows")

    def __init__(self, rows: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        self.rows = rows
        self.columns = columns

    @property
    def size(self) -> int:
        return self.rows.size

    def narrow(self, begin: int, end: int) -> RowGroup:
        inside = (self.rows >= begin) & (self.rows < end)
        return RowGroup(self.rows[inside] - begin, {name: column[inside] for name, column in self.columns.items()})

    def without(self, rows: np.ndarray) -> RowGroup:
        others = ~np.isin(self.rows, rows)
        return RowGroup(self.rows[others], {name: column[others] for name, column in self.columns.items()})


class CapturedDraw(NamedTuple):
    """Behind a replay: its logits fp32 and tokens int32, and the graph in which its sampled rows draw (None: there is
    none)."""

    logits: Tensor
    tokens: Tensor
    graph: DeviceGraph | None


NOBODY = RowGroup(np.empty(0, np.int64), {})


@dataclass(slots=True)
class SamplingPlan:
    """Columns of the groups: `sampled`: handles, uniform; `adjusted`: handles, counts, biases (rows of the tables, 0:
    none), floor (-inf for rows under their shortest length, else 0).

    `handles` int64 [rows]; `kept` bool [rows]: rows that draw. `num_candidates` and `needs_mass` as in `choose_tokens`.
    `cuts`: some sampled row has a top-k or a top-p. `num_top`: most alternatives that an `asked` row wants.
    `has_counts`, `has_biases`: some adjusted row has one. `staged=False`: the groups were cut out and are not what lies
    in the slot. `captured`: what a replay of the forward that was captured with this plan leaves.
    """

    handles: np.ndarray
    kept: np.ndarray
    sampled: RowGroup = NOBODY
    adjusted: RowGroup = NOBODY
    asked: RowGroup = NOBODY
    num_candidates: int = 0
    needs_mass: bool = False
    cuts: bool = False
    num_top: int = 0
    has_counts: bool = False
    has_biases: bool = False
    staged: bool = True
    captured: CapturedDraw | None = None

    @property
    def plain(self) -> bool:
        """Nothing but an argmax."""
        return not (self.sampled.size or self.adjusted.size or self.asked.size)

    def groups(self) -> Mapping[str, RowGroup]:
        return {"sampled": self.sampled, "adjusted": self.adjusted, "asked": self.asked}

    def adjusted_with(self, rows: np.ndarray) -> RowGroup:
        """`adjusted` and these `rows` (int64, rising), which have one more column: `masks`, each row's place among
        `rows` (-1: none)."""
        every = np.union1d(self.adjusted.rows, rows)
        masks = np.full(every.size, -1, np.int64)
        masks[np.searchsorted(every, rows)] = np.arange(rows.size)
        columns = {"handles": self.handles[every], "masks": masks}
        old = np.searchsorted(every, self.adjusted.rows)
        for name, dtype in (("counts", np.int64), ("biases", np.int64), ("floor", np.float32)):
            columns[name] = np.zeros(every.size, dtype)
            if old.size:
                columns[name][old] = self.adjusted.columns[name]
        return RowGroup(every, columns)

    def unadjusted(self, rows: np.ndarray) -> SamplingPlan:
        """The plan in which the logits of `rows` (int64) stay as they are: nothing is read of their tables."""
        adjusted = self.adjusted.without(rows)
        has_counts = bool(adjusted.size) and bool(adjusted.columns["counts"].any())
        has_biases = bool(adjusted.size) and bool(adjusted.columns["biases"].any())
        return replace(self, adjusted=adjusted, has_counts=has_counts, has_biases=has_biases)

    def narrow(self, begin: int, end: int) -> SamplingPlan:
        """The plan of rows `begin:end` alone."""
        groups = {name: group.narrow(begin, end) for name, group in self.groups().items()}
        return SamplingPlan(
            self.handles[begin:end],
            self.kept[begin:end],
            num_candidates=self.num_candidates,
            needs_mass=self.needs_mass,
            cuts=self.cuts,
            num_top=self.num_top,
            has_counts=self.has_counts,
            has_biases=self.has_biases,
            staged=False,
            sampled=groups["sampled"],
            adjusted=groups["adjusted"],
            asked=groups["asked"],
        )


def plan_sampling(
    columns: SamplingColumns,
    handles: np.ndarray,
    kept: np.ndarray | None,
    count_rows: np.ndarray,
    bias_rows: np.ndarray,
    *,
    sorts_all: bool,
) -> SamplingPlan:
    """`count_rows`, `bias_rows` int64 by handle: table rows of `TokenCounts` and `TokenBiases` (0: none).
    `sorts_all`: rows without a top-k look at the whole vocabulary at once (the second look would wait for a device)."""
    plan = SamplingPlan(handles, np.ones(handles.size, np.bool_) if kept is None else kept)
    wants = columns.wants[handles]
    if kept is not None:
        wants *= kept
    wanted = int(np.bitwise_or.reduce(wants))
    if wanted & SAMPLE:
        plan.needs_mass, plan.cuts = bool(wanted & MASS), bool(wanted & CUT)
        _plan_sampled(plan, columns, handles, (wants & SAMPLE).nonzero()[0], sorts_all)
    if wanted & (COUNT | BIAS):
        plan.has_counts, plan.has_biases = bool(wanted & COUNT), bool(wanted & BIAS)
        rows = (wants & (COUNT | BIAS)).nonzero()[0]
        changed = handles[rows]
        counts, biases = count_rows[changed], bias_rows[changed]
        under = (columns.num_draws[changed] < columns.min_tokens[changed]) & (biases > 0)
        floor = np.where(under, np.float32(-np.inf), np.float32(0))
        plan.adjusted = RowGroup(rows, {"handles": changed, "counts": counts, "biases": biases, "floor": floor})
    if wanted & LOGPROBS:
        rows = (wants & LOGPROBS).nonzero()[0]
        plan.asked = RowGroup(rows, {})
        plan.num_top = int(columns.num_logprobs[handles[rows]].max())
    return plan


def _plan_sampled(
    plan: SamplingPlan, columns: SamplingColumns, handles: np.ndarray, rows: np.ndarray, sorts_all: bool
) -> None:
    drawing = handles[rows]
    uniform = uniforms(columns.keys[drawing], columns.num_draws[drawing])
    plan.sampled = RowGroup(rows, {"handles": drawing, "uniform": uniform})
    if plan.needs_mass and sorts_all:
        plan.num_candidates = columns.vocab_size
    else:
        largest = int(columns.top_k[drawing].max())
        plan.num_candidates = min(columns.vocab_size, max(largest + _SLACK, _FEW if plan.needs_mass else 0))
