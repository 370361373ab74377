"""From portions of rows to a `Step`: what each row computes now, and which resources the step touches.

Loop thread, host integers. The node's hooks say what its rows want; rows are cut to their limits here, and rows whose
cache is being restored are not the node's business at all: their tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mstar.engine.execution import Portion, Step, StepPart
from mstar.engine.node_hooks import HookFailed, ask_declare, ask_prepare, check_alike
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.row_table import RowTable
from mstar.engine.step import Rows
from mstar.engine.step_batch import cut_parts, join_parts, join_spans, merge_rows
from mstar.engine.step_plan import StepPlan
from mstar.engine.submodule import LIVE_TOKEN, NodeBatch, RowColumns
from mstar.engine.unfinished_rows import accumulating, row_limits, silence, silent_rows
from mstar.graph.protocol import LIVE_COLUMN, TakenRows


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
        part_columns = (columns,) if len(parts) == 1 else tuple(_slice_columns(columns, part) for part in parts)
        handles = columns.handles
        step = Step(node.name, tuple(parts), handles, np.zeros(handles.size, np.int32), columns, part_columns)
        restoring = node.restoring(handles, columns.lengths)
        batches: list[NodeBatch] = []
        for part, own in zip(parts, part_columns, strict=True):
            restored = None if restoring is None else restoring[part.begin : part.end]
            try:
                batches.append(self._part_batch(node, part.taken.key.walk, own, restored, step.failed))
            except HookFailed as error:
                step.failed.update(dict.fromkeys(part.taken.rows, str(error)))
        if step.failed:
            return Built(step, [])
        try:
            return self._complete(node, step, portions, batches, restoring)
        except HookFailed as error:
            step.fail_all(str(error))
            return Built(step, [])

    def _complete(
        self,
        node: NodeRuntime,
        step: Step,
        portions: Sequence[Portion],
        batches: Sequence[NodeBatch],
        restoring: np.ndarray | None,
    ) -> Built:
        """The step from what its parts compute if nothing is cut. Raises `HookFailed`."""
        check_alike(node, batches)
        wanted = join_spans(batches)
        fewest = np.minimum.reduce(wanted) if step.num_rows else 0
        if fewest < 0:
            return Built(None, step.handles[wanted < 0].tolist())
        self._check_lengths(node, step, wanted)
        if step.failed:
            return Built(step, [])
        step.spans = wanted
        limits = row_limits(node, portions, step.parts, step.columns, restoring)
        if any(own is not None for own in limits):
            batches = cut_parts(batches, limits)
            step.spans = join_spans(batches)
            if (step.spans < wanted).any():
                step.unfinished = step.spans < wanted
        batch = join_parts(batches, node.submodule.token_columns)
        if restoring is not None:
            step.unfinished = restoring if step.unfinished is None else step.unfinished | restoring
        single = fewest == 1 and batch.token_ids is not None and len(batch.token_ids) == step.num_rows
        step.plan = self._plan(node, step, batch, restoring, single=single)
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
        check_alike(node, [restored, asked])
        return merge_rows([(index, restored), (others, asked)], node.submodule.token_columns)

    def _restored_batch(self, node: NodeRuntime, handles: np.ndarray) -> NodeBatch:
        """All that the rows' caches lack of their targets: prompt tokens, then drawn ones."""
        assert node.cache is not None
        lengths, targets = node.cache.lengths[handles], node.cache.targets[handles]
        tokens = [
            self._rows.token_ids(handle, begin, end, node.drawn)
            for handle, begin, end in zip(handles.tolist(), lengths.tolist(), targets.tolist(), strict=True)
        ]
        return NodeBatch((targets - lengths).astype(np.int32), np.concatenate(tokens))

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

    def _check_lengths(self, node: NodeRuntime, step: Step, spans: np.ndarray) -> None:
        """A row that will not fit with all that it has to compute fails before its first chunk."""
        if node.cache is None or not step.num_rows:
            return
        after = step.columns.lengths + spans
        if np.maximum.reduce(after) > self._max_seq_len:
            for index in np.flatnonzero(after > self._max_seq_len).tolist():
                step.failed[int(step.handles[index])] = (
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
        silent = silent_rows(node, step)
        kept = batch.kept
        if silent is not None:
            kept = ~silent if kept is None else kept & ~silent
        declared, touched = ask_declare(node, walk, rows, kept, single=single)
        if silent is not None:
            silence(touched, rows, silent)
        token_ids = batch.token_ids
        live_only = (
            token_ids is not None and token_ids.size == step.spans.size and bool((token_ids == LIVE_TOKEN).all())
        )
        plan = StepPlan(walk, rows, touched, token_ids, step.columns.iterations, live_only)
        plan.cg_key_info = None if declared is None else declared.cg_key_info
        plan.restoring = restoring
        plan.token_columns = batch.token_columns or {}
        if step.unfinished is not None:
            plan.finished = (~step.unfinished).nonzero()[0]
        if node.chunk_outputs is not None:
            plan.accumulating = accumulating(node, step)
        return plan


def _slice_columns(columns: RowColumns, part: StepPart) -> RowColumns:
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


def _all_live(ids: Sequence[int]) -> bool:
    return len(ids) > 0 and ids.count(LIVE_COLUMN) == len(ids)
