"""What becomes of rows whose run goes on behind a step: how far they are cut, and that they draw and give out nothing.

Loop thread, host integers; a part of `StepBuilder`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstar.engine.execution import Portion, Step, StepPart
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.step import Rows, SamplerStep
from mstar.engine.step_plan import Accumulating
from mstar.engine.submodule import RowColumns
from mstar.engine.touched import Touched

_NO_LIMIT = np.iinfo(np.int32).max


def row_limits(
    node: NodeRuntime,
    portions: Sequence[Portion],
    parts: Sequence[StepPart],
    columns: RowColumns,
    restoring: np.ndarray | None,
) -> list[np.ndarray | None]:
    """By part, the tokens of each row at most: int32 [rows of the part]; None: they have no limit. Only chunks and what
    is restored can be cut: at what the step has room for, and where a row's state is to be kept."""
    limits: list[np.ndarray | None] = []
    for portion, part in zip(portions, parts, strict=True):
        own = None if portion.limits is None else np.maximum(portion.limits, 1)
        chunked = node.policies.of(part.taken.key.walk).chunked
        if (chunked or restoring is not None) and node.cache is not None:
            rows = slice(part.begin, part.end)
            cuts = node.cache.holdings.tokens_to_cut(columns.handles[rows], columns.lengths[rows])
            if cuts is not None:
                own = cuts if own is None else np.minimum(own, cuts)
        if own is not None and not chunked:
            own = None if restoring is None else np.where(restoring[part.begin : part.end], own, _NO_LIMIT)
        limits.append(own)
    return limits


def silent_rows(node: NodeRuntime, step: Step) -> np.ndarray | None:
    """bool [rows]: rows that draw nothing whatever the node says: unfinished ones, and those of chunked walks that do
    not ask for the final chunk's sample. None: no row."""
    silent = step.unfinished
    for part in step.parts:
        policy = node.policies.of(part.taken.key.walk)
        if policy.chunked and not policy.keep_final_chunk_samples:
            silent = np.zeros(step.num_rows, np.bool_) if silent is None else silent.copy()
            silent[part.begin : part.end] = True
    return silent


def silence(touched: Sequence[Touched], rows: Rows, silent: np.ndarray) -> None:
    """No sampler draws for the step's rows that are `silent` bool [rows], whatever was declared."""
    for item in touched:
        if isinstance(item.step, SamplerStep):
            if item.rows is rows:
                draws = ~silent
            else:
                draws = ~np.isin(item.rows.handles, rows.handles[silent])
            kept = draws if item.step.kept is None else item.step.kept & draws
            item.step = SamplerStep(item.step.rows, kept)


def accumulating(node: NodeRuntime, step: Step) -> list[Accumulating]:
    """Which outputs are joined over chunks, and for which rows."""
    return [
        Accumulating(signals, np.arange(part.begin, part.end), step.columns.lengths)
        for part in step.parts
        if (signals := node.policies.of(part.taken.key.walk).accumulate)
    ]
