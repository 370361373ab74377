"""What one step asks of the sampler: which of its rows need more than an argmax, as host columns.

Loop thread. A step of plain greedy rows has an empty plan and costs an argmax; every feature names only its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mstar.engine.resources.random_draw import uniforms
from mstar.engine.resources.sampling_columns import SamplingColumns

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


NOBODY = RowGroup(np.empty(0, np.int64), {})


@dataclass(slots=True)
class SamplingPlan:
    """Columns of the groups: `sampled`: handles, uniform; `penalized`: handles, table; `biased`: table, floor.

    `kept` bool [rows]: rows that draw. `num_candidates` and `needs_mass` as in `choose_tokens`. `num_top`: most
    alternatives that an `asked` row wants. `staged=False`: the groups were cut out and are not what lies in the slot.
    """

    kept: np.ndarray
    sampled: RowGroup = NOBODY
    penalized: RowGroup = NOBODY
    biased: RowGroup = NOBODY
    asked: RowGroup = NOBODY
    num_candidates: int = 0
    needs_mass: bool = False
    num_top: int = 0
    staged: bool = True

    @property
    def plain(self) -> bool:
        """Nothing but an argmax."""
        return not (self.sampled.size or self.penalized.size or self.biased.size or self.asked.size)

    def groups(self) -> Mapping[str, RowGroup]:
        return {"sampled": self.sampled, "penalized": self.penalized, "biased": self.biased, "asked": self.asked}

    def narrow(self, begin: int, end: int) -> SamplingPlan:
        """The plan of rows `begin:end` alone."""
        groups = {name: group.narrow(begin, end) for name, group in self.groups().items()}
        return SamplingPlan(
            self.kept[begin:end],
            num_candidates=self.num_candidates,
            needs_mass=self.needs_mass,
            num_top=self.num_top,
            staged=False,
            **groups,
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
    plan = SamplingPlan(np.ones(handles.size, np.bool_) if kept is None else kept)
    odd = ~columns.greedy[handles]
    if kept is not None:
        odd &= kept
    if odd.any():
        _plan_sampled(plan, columns, handles, odd.nonzero()[0], sorts_all)
    tables = count_rows[handles]
    if tables.any():
        rows = ((tables > 0) & plan.kept).nonzero()[0]
        plan.penalized = RowGroup(rows, {"handles": handles[rows], "table": tables[rows]})
    tables = bias_rows[handles]
    if tables.any():
        rows = ((tables > 0) & plan.kept).nonzero()[0]
        under = columns.num_draws[handles[rows]] < columns.min_tokens[handles[rows]]
        floor = np.where(under, np.float32(-np.inf), np.float32(0))
        plan.biased = RowGroup(rows, {"table": tables[rows], "floor": floor})
    wanted = columns.num_logprobs[handles]
    if wanted.max(initial=-1) >= 0:
        rows = ((wanted >= 0) & plan.kept).nonzero()[0]
        plan.asked = RowGroup(rows, {})
        plan.num_top = int(wanted[rows].max(initial=0))
    return plan


def _plan_sampled(
    plan: SamplingPlan, columns: SamplingColumns, handles: np.ndarray, rows: np.ndarray, sorts_all: bool
) -> None:
    drawing = handles[rows]
    uniform = uniforms(columns.keys[drawing], columns.num_draws[drawing])
    plan.sampled = RowGroup(rows, {"handles": drawing, "uniform": uniform})
    top_k = columns.top_k[drawing]
    plan.needs_mass = bool((top_k == 0).any())
    largest = int(top_k.max())
    if plan.needs_mass and sorts_all:
        plan.num_candidates = columns.vocab_size
    else:
        plan.num_candidates = min(columns.vocab_size, max(largest + _SLACK, _FEW if plan.needs_mass else 0))
