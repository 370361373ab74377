"""From portions of rows to a `Step`: what each row computes now, and which resources the step touches.

Loop thread, host integers. The node's hooks say what its rows want; rows are cut to their limits here, and rows whose
cache is being restored are not the node's business at all: their tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mstar.engine.execution import Portion, Step, StepPart
from mstar.engine.node_hooks import HookFailed, ask_declare, ask_prepare
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.row_table import RowTable
from mstar.engine.step import Rows, SamplerStep
from mstar.engine.step_batch import cut_rows, join_parts, merge_rows
from mstar.engine.step_plan import Accumulating, StepPlan
from mstar.engine.submodule import LIVE_TOKEN, NodeBatch, RowColumns
from mstar.engine.touched import Touched
from mstar.graph.protocol import LIVE_COLUMN, TakenRows

_NO_LIMIT = np.iinfo(np.int32).max
_NO_SPANS = np.empty(0, np.int32)


class Built(NamedTuple):
    """`declined`: rows whose node computes nothing for them now; with any, there is no step."""

    step: Step | None
    declined: list[int]


class StepBuilder:
    """See the module docstring."""

    def __init__(self, rows: RowTable, max_seq_len: int) -> None:
        self._rows = rows
        self._max_seq_len = max_seq_len

    def build(self, node: NodeRuntime, portions: Sequence[Portion]) -> Built:
        """One step of all portions (of one node, decode-like part first)."""
        parts: list[StepPart] = []
        begin = 0
        for taken, _ in portions:
            parts.append(StepPart(taken, begin, begin + len(taken.rows)))
            begin += len(taken.rows)
        columns = self._columns(node, [part.taken for part in parts])
        handles = columns.handles
        restoring = node.restoring(handles, columns.lengths)
        failed: dict[int, str] = {}
        batches: list[NodeBatch] = []
        for part in parts:
            own = columns if len(parts) == 1 else slice_columns(columns, part)
            restored = None if restoring is None else restoring[part.begin : part.end]
            try:
                batches.append(self._part_batch(node, part.taken.key.walk, own, restored, failed))
            except HookFailed as error:
                failed.update(dict.fromkeys(part.taken.rows, str(error)))
        step = Step(node.name, tuple(parts), handles, _NO_SPANS, columns, failed=failed)
        if failed:
            step.spans = np.zeros(handles.size, np.int32)
            return Built(step, [])
        batch = join_parts(batches, node.submodule.token_columns)
        step.spans = np.asarray(batch.spans, np.int32)
        fewest = np.minimum.reduce(step.spans) if handles.size else 0
        if fewest < 0:
            return Built(None, handles[step.spans < 0].tolist())
        self._check_lengths(node, columns, step.spans, failed)
        if failed:
            return Built(step, [])
        limits = _limits(node, portions, parts, restoring)
        if limits is not None:
            cut = np.minimum(step.spans, limits)
            if (cut < step.spans).any():
                step.unfinished = cut < step.spans
                step.spans = cut
                batch = cut_rows(batch, cut)
        if restoring is not None:
            step.unfinished = restoring if step.unfinished is None else step.unfinished | restoring
        try:
            single = fewest == 1 and batch.token_ids is not None and len(batch.token_ids) == handles.size
            step.plan = self._plan(node, step, batch, restoring, single=single)
        except HookFailed as error:
            failed.update(dict.fromkeys(handles.tolist(), str(error)))
        return Built(step, [])

    def _columns(self, node: NodeRuntime, taken: Sequence[TakenRows]) -> RowColumns:
        first = taken[0]
        if len(taken) == 1:
            rows, iterations, finals = first.rows, first.iterations, first.finals
        else:
            rows = [row for part in taken for row in part.rows]
            iterations = [value for part in taken for value in part.iterations]
            finals = [value for part in taken for value in part.finals]
        handles = np.fromiter(rows, np.int64, len(rows))
        live = frozenset(name for name, ids in first.ids.items() if _all_live(ids))
        return RowColumns(
            handles,
            node.lengths(handles),
            self._rows.num_prompt[handles],
            node.num_draws(handles),
            np.fromiter(iterations, np.int32, len(rows)),
            np.fromiter(finals, np.bool_, len(rows)),
            self._rows.prompts(handles),
            live,
        )

    def _part_batch(
        self, node: NodeRuntime, walk: str, columns: RowColumns, restoring: np.ndarray | None, failed: dict[int, str]
    ) -> NodeBatch:
        """What the rows of one part compute, if nothing is cut. Raises `HookFailed`."""
        if restoring is None or not restoring.any():
            return ask_prepare(node, walk, columns, failed)
        index = np.flatnonzero(restoring)
        restored = self._restored_batch(node, columns.handles[index])
        if index.size == restoring.size:
            return restored
        others = np.flatnonzero(~restoring)
        asked = ask_prepare(node, walk, self._select_columns(columns, others), failed)
        if failed:
            return asked
        return merge_rows([(index, restored), (others, asked)], node.submodule.token_columns)

    def _restored_batch(self, node: NodeRuntime, handles: np.ndarray) -> NodeBatch:
        """All that the rows' caches lack of their targets: prompt tokens, then drawn ones."""
        assert node.cache is not None
        lengths, targets = node.cache.lengths[handles], node.cache.targets[handles]
        tokens = [
            self._rows.token_ids(handle, begin, end, node.drawn)
            for handle, begin, end in zip(handles.tolist(), lengths.tolist(), targets.tolist(), strict=True)
        ]
        return NodeBatch((targets - lengths).astype(np.int32), np.concatenate(tokens), np.zeros(handles.size, np.bool_))

    def _select_columns(self, columns: RowColumns, index: np.ndarray) -> RowColumns:
        handles = columns.handles[index]
        return RowColumns(
            handles,
            columns.lengths[index],
            columns.num_prompt[index],
            columns.num_draws[index],
            columns.iterations[index],
            columns.finals[index],
            self._rows.prompts(handles),
            columns.live,
        )

    def _check_lengths(self, node: NodeRuntime, columns: RowColumns, spans: np.ndarray, failed: dict[int, str]) -> None:
        """A row that will not fit fails before its first chunk."""
        if node.cache is None or not spans.size:
            return
        after = columns.lengths + spans
        if after.max() > self._max_seq_len:
            for index in np.flatnonzero(after > self._max_seq_len).tolist():
                failed[int(columns.handles[index])] = (
                    f"{int(after[index])} tokens are more than a row can hold ({self._max_seq_len})"
                )

    def _plan(
        self, node: NodeRuntime, step: Step, batch: NodeBatch, restoring: np.ndarray | None, *, single: bool
    ) -> StepPlan:
        """`single`: it is known that every row has one token. Raises `HookFailed`."""
        walk = step.parts[-1].taken.key.walk
        if restoring is not None:
            assert node.policies.recomputable is not None
            walk = node.policies.recomputable
        rows = Rows(step.handles, step.spans)
        silent = _silent(node, step)
        kept = batch.kept
        if silent is not None:
            kept = ~silent if kept is None else kept & ~silent
        declared, touched = ask_declare(node, walk, rows, kept, single=single)
        if silent is not None:
            _silence(touched, step.handles[silent])
        token_ids = batch.token_ids
        live_only = (
            token_ids is not None and token_ids.size == step.spans.size and bool((token_ids == LIVE_TOKEN).all())
        )
        plan = StepPlan(walk, rows, touched, token_ids, step.columns.iterations, live_only)
        plan.cg_key_info = None if declared is None else declared.cg_key_info
        plan.kept = kept
        plan.restoring = restoring
        plan.token_columns = batch.token_columns or {}
        if step.unfinished is not None:
            plan.finished = np.flatnonzero(~step.unfinished)
        if node.chunk_outputs is not None:
            plan.accumulating = _accumulating(node, step, restoring)
        return plan


def slice_columns(columns: RowColumns, part: StepPart) -> RowColumns:
    """The columns of one part of a step."""
    cut = slice(part.begin, part.end)
    return RowColumns(
        columns.handles[cut],
        columns.lengths[cut],
        columns.num_prompt[cut],
        columns.num_draws[cut],
        columns.iterations[cut],
        columns.finals[cut],
        columns.prompts[cut],
        frozenset(name for name, ids in part.taken.ids.items() if _all_live(ids)),
    )


def _limits(
    node: NodeRuntime, portions: Sequence[Portion], parts: Sequence[StepPart], restoring: np.ndarray | None
) -> np.ndarray | None:
    """Tokens of each row at most; None: nothing is limited. Only chunks and what is restored can be cut."""
    limits: np.ndarray | None = None
    for portion, part in zip(portions, parts, strict=True):
        if portion.limits is None:
            continue
        own = np.maximum(portion.limits, 1)
        if not node.policies.of(part.taken.key.walk).chunked:
            if restoring is None:
                continue
            own = np.where(restoring[part.begin : part.end], own, _NO_LIMIT)
        if limits is None:
            limits = np.full(parts[-1].end, _NO_LIMIT, np.int32)
        limits[part.begin : part.end] = own
    return limits


def _silent(node: NodeRuntime, step: Step) -> np.ndarray | None:
    """bool [rows]: rows that draw nothing whatever the node says: unfinished ones, and those of chunked walks that do
    not ask for the final chunk's sample. None: no row."""
    silent = step.unfinished
    for part in step.parts:
        policy = node.policies.of(part.taken.key.walk)
        if policy.chunked and not policy.keep_final_chunk_samples:
            silent = np.zeros(step.num_rows, np.bool_) if silent is None else silent.copy()
            silent[part.begin : part.end] = True
    return silent


def _silence(touched: Sequence[Touched], handles: np.ndarray) -> None:
    """No sampler draws for `handles`, whatever was declared."""
    for item in touched:
        if isinstance(item.step, SamplerStep):
            draws = ~np.isin(item.rows.handles, handles)
            kept = draws if item.step.kept is None else item.step.kept & draws
            item.step = SamplerStep(item.step.rows, kept)


def _accumulating(node: NodeRuntime, step: Step, restoring: np.ndarray | None) -> list[Accumulating]:
    """Which outputs are joined over chunks, and for which rows. What is restored has been given out before."""
    found: list[Accumulating] = []
    for part in step.parts:
        signals = node.policies.of(part.taken.key.walk).accumulate
        rows = np.arange(part.begin, part.end)
        if restoring is not None:
            rows = rows[~restoring[rows]]
        if signals and rows.size:
            found.append(Accumulating(signals, rows, step.columns.lengths))
    return found


def _all_live(ids: Sequence[int]) -> bool:
    return len(ids) > 0 and ids.count(LIVE_COLUMN) == len(ids)
