"""From taken rows to a `Step`: asks the node's hooks what each row computes and which resources it touches.

Loop thread, host integers. A hook is the model's code: what it raises fails rows, never the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mstar.engine.execution import Step, StepPart
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.row_table import RowTable
from mstar.engine.step import Rows, SubmoduleStep
from mstar.engine.step_plan import StepPlan
from mstar.engine.submodule import LIVE_TOKEN, NodeBatch, NodeSubmodule, RowColumns, StopDecision
from mstar.engine.touched import Touched
from mstar.graph.protocol import LIVE_COLUMN, TakenRows


class Built(NamedTuple):
    """`declined`: rows whose node computes nothing for them now; with any, there is no step."""

    step: Step | None
    declined: list[int]


class HookFailed(Exception):
    """A batch hook raised, or answered what cannot be; the message names it."""


class StepBuilder:
    """See the module docstring."""

    def __init__(self, rows: RowTable, max_seq_len: int) -> None:
        self._rows = rows
        self._max_seq_len = max_seq_len

    def build(self, node: NodeRuntime, taken: Sequence[TakenRows]) -> Built:
        """One step of all `taken` (of one node, decode-like part first)."""
        parts: list[StepPart] = []
        begin = 0
        for part in taken:
            parts.append(StepPart(part, begin, begin + len(part.rows)))
            begin += len(part.rows)
        columns = self._columns(node, taken)
        failed: dict[int, str] = {}
        batches: list[NodeBatch] = []
        for part in parts:
            part_columns = columns if len(parts) == 1 else slice_columns(columns, part)
            try:
                batches.append(self._ask(node, part.taken.key.walk, part_columns, failed))
            except HookFailed as error:
                failed.update(dict.fromkeys(part.taken.rows, str(error)))
        handles = columns.handles
        if failed:
            return Built(self._step(node, parts, columns, np.zeros(handles.size, np.int32), None, failed), [])
        batch = batches[0] if len(batches) == 1 else _joined(batches)
        spans = np.asarray(batch.spans, np.int32)
        if spans.size and spans.min() < 0:
            return Built(None, handles[spans < 0].tolist())
        self._check_batch(node, columns, spans, batch, failed)
        plan: StepPlan | None = None
        if not failed:
            try:
                plan = self._plan(node, parts[-1].taken.key.walk, columns, spans, batch)
            except HookFailed as error:
                failed.update(dict.fromkeys(handles.tolist(), str(error)))
        return Built(self._step(node, parts, columns, spans, plan, failed), [])

    def _columns(self, node: NodeRuntime, taken: Sequence[TakenRows]) -> RowColumns:
        first = taken[0]
        if len(taken) == 1:
            rows, iterations, finals = first.rows, first.iterations, first.finals
        else:
            rows = [row for part in taken for row in part.rows]
            iterations = [value for part in taken for value in part.iterations]
            finals = [value for part in taken for value in part.finals]
        handles = np.array(rows, np.int64)
        live = frozenset(name for name, ids in first.ids.items() if _all_live(ids))
        return RowColumns(
            handles,
            node.lengths(handles),
            self._rows.num_prompt[handles],
            node.num_draws(handles),
            np.array(iterations, np.int32),
            np.array(finals, np.bool_),
            self._rows.prompts(handles),
            live,
        )

    def _ask(self, node: NodeRuntime, walk: str, columns: RowColumns, failed: dict[int, str]) -> NodeBatch:
        submodule = node.submodule
        try:
            batch = submodule.prepare_batch(walk, columns)
        except Exception as error:
            raise HookFailed(_hook_message(submodule, "prepare_batch", walk, error)) from error
        return self._ask_rows(node, walk, columns, failed) if batch is None else batch

    def _ask_rows(self, node: NodeRuntime, walk: str, columns: RowColumns, failed: dict[int, str]) -> NodeBatch:
        """Row by row, for nodes without a columnar hook."""
        submodule = node.submodule
        num_rows = columns.handles.size
        spans = np.zeros(num_rows, np.int32)
        kept = np.ones(num_rows, np.bool_)
        token_ids: list[np.ndarray] = []
        for index in range(num_rows):
            try:
                row = submodule.prepare_inputs(walk, columns, index)
            except Exception as error:
                failed[int(columns.handles[index])] = _hook_message(submodule, "prepare_inputs", walk, error)
                continue
            if row is None:
                spans[index] = -1
                continue
            spans[index] = row.span
            kept[index] = row.kept
            if row.token_ids is not None:
                token_ids.append(row.token_ids)
        return NodeBatch(spans, np.concatenate(token_ids) if token_ids else None, None if kept.all() else kept)

    def _check_batch(
        self, node: NodeRuntime, columns: RowColumns, spans: np.ndarray, batch: NodeBatch, failed: dict[int, str]
    ) -> None:
        """What a hook may get wrong, before it becomes an index out of range."""
        num_rows, num_tokens = columns.handles.size, int(spans.sum())
        if spans.size != num_rows or (batch.token_ids is not None and len(batch.token_ids) != num_tokens):
            given = None if batch.token_ids is None else len(batch.token_ids)
            message = (
                f"{type(node.submodule).__name__} gave {spans.size} spans ({num_tokens} tokens) and {given} token ids "
                f"for {num_rows} rows"
            )
            failed.update(dict.fromkeys(columns.handles.tolist(), message))
        elif batch.token_ids is not None and node.sampler is None and num_tokens and np.min(batch.token_ids) < 0:
            message = f"{type(node.submodule).__name__} reads live tokens, but node {node.name!r} has no sampler"
            failed.update(dict.fromkeys(columns.handles.tolist(), message))
        elif node.cache is not None and num_rows:
            after = columns.lengths + spans
            if after.max() > self._max_seq_len:
                for index in np.flatnonzero(after > self._max_seq_len).tolist():
                    failed[int(columns.handles[index])] = (
                        f"{int(after[index])} tokens are more than a row can hold ({self._max_seq_len})"
                    )

    def _plan(self, node: NodeRuntime, walk: str, columns: RowColumns, spans: np.ndarray, batch: NodeBatch) -> StepPlan:
        rows = Rows(columns.handles, spans)
        submodule = node.submodule
        try:
            declared = submodule.declare_step(walk, rows, batch.kept)
            touched = [] if declared is None else touched_resources(node, declared, rows)
        except Exception as error:
            raise HookFailed(_hook_message(submodule, "declare_step", walk, error)) from error
        token_ids = batch.token_ids
        live_only = token_ids is not None and token_ids.size == spans.size and bool((token_ids == LIVE_TOKEN).all())
        info = None if declared is None else declared.cg_key_info
        return StepPlan(walk, rows, touched, token_ids, columns.iterations, live_only, info)

    @staticmethod
    def _step(
        node: NodeRuntime,
        parts: list[StepPart],
        columns: RowColumns,
        spans: np.ndarray,
        plan: StepPlan | None,
        failed: dict[int, str],
    ) -> Step:
        return Step(node.name, tuple(parts), columns.handles, spans, columns, plan=plan, failed=failed)


def touched_resources(node: NodeRuntime, declared: SubmoduleStep, rows: Rows) -> list[Touched]:
    """The resources of a declared step in the node's order (caches before what reads them).

    Raises:
        LookupError: a key that the node does not declare, or attention without the cache it reads.
    """
    if unknown := declared.steps.keys() - node.resources.keys():
        raise LookupError(f"the step touches {sorted(unknown)}, not among the resources of node {node.name!r}")
    rows = rows if declared.rows is None else declared.rows
    num_tokens, single = rows.num_tokens, rows.single
    touched: list[Touched] = []
    for key, resource in node.resources.items():
        step = declared.steps.get(key)
        if step is not None:
            own = step.rows
            if own is None:
                touched.append(Touched(resource, step, rows, num_tokens, single))
            else:
                touched.append(Touched(resource, step, own, own.num_tokens, own.single))
    for item in touched:
        if missing := [key for key in item.resource.reads if key not in declared.steps]:
            raise LookupError(f"the step touches {item.resource.key!r} but not {missing[0]!r}, which that reads")
    return touched


def ask_can_batch(node: NodeRuntime, walk: str, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> bool:
    """Raises `HookFailed`."""
    try:
        return node.submodule.can_batch(walk, shapes)
    except Exception as error:
        raise HookFailed(_hook_message(node.submodule, "can_batch", walk, error)) from error


def ask_check_stop(
    node: NodeRuntime, walk: str, columns: RowColumns, host: Mapping[str, np.ndarray]
) -> list[StopDecision]:
    """Raises `HookFailed`."""
    submodule, num_rows = node.submodule, columns.handles.size
    try:
        decisions = submodule.check_stop(walk, columns, host)
        for decision in decisions:
            if decision.index.size and not 0 <= decision.index.min() <= decision.index.max() < num_rows:
                raise IndexError(f"positions {decision.index.tolist()} in a part of {num_rows} rows")
    except Exception as error:
        raise HookFailed(_hook_message(submodule, "check_stop", walk, error)) from error
    return decisions


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


def _all_live(ids: Sequence[int]) -> bool:
    return len(ids) > 0 and ids.count(LIVE_COLUMN) == len(ids)


def _joined(batches: Sequence[NodeBatch]) -> NodeBatch:
    """The batches of a step's parts, one after the other."""
    spans = np.concatenate([batch.spans for batch in batches])
    token_ids = [batch.token_ids for batch in batches if batch.token_ids is not None]
    kept = None
    if any(batch.kept is not None for batch in batches):
        kept = np.concatenate(
            [np.ones(len(batch.spans), np.bool_) if batch.kept is None else batch.kept for batch in batches]
        )
    return NodeBatch(spans, np.concatenate(token_ids) if token_ids else None, kept)


def _hook_message(submodule: NodeSubmodule, hook: str, walk: str, error: Exception) -> str:
    return f"{type(submodule).__name__}.{hook} of walk {walk!r} raised {type(error).__name__}: {error}"
