"""Asking a node's hooks. A hook is the model's code: what it raises fails rows, never the worker. Loop thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mstar.engine.fault_log import log_fault
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.step import Rows, SubmoduleStep
from mstar.engine.submodule import NodeBatch, NodeInputs, NodeSubmodule, RowColumns, StopDecision
from mstar.engine.touched import Touched


class HookFailed(Exception):
    """A batch hook raised, or answered what cannot be; the message names it."""


def ask_prepare(node: NodeRuntime, walk: str, columns: RowColumns, failed: dict[int, str]) -> NodeBatch:
    """What the rows compute, as they are (a hook per row that raises adds the row to `failed`, a row that declines has
    a negative span).

    Raises:
        HookFailed: the columnar hook raised, or what the node gave does not fit the rows or itself.
    """
    submodule = node.submodule
    try:
        batch = submodule.prepare_batch(walk, columns)
    except Exception as error:
        raise HookFailed(_message(submodule, "prepare_batch", walk, error)) from error
    if batch is None:
        batch = _ask_rows(submodule, walk, columns, failed)
    if not failed:
        _check(node, columns, batch)
    return batch


def check_alike(node: NodeRuntime, batches: Sequence[NodeBatch]) -> None:
    """Rows of one forward all have tokens, or none has. Raises `HookFailed`."""
    if len(batches) > 1 and any(batch.token_ids is None for batch in batches):
        if any(np.any(batch.spans) for batch in batches if batch.token_ids is None):
            if any(batch.token_ids is not None for batch in batches):
                raise HookFailed(f"rows of node {node.name!r} with token ids share a step with rows that have none")


def ask_declare(
    node: NodeRuntime, walk: str, rows: Rows, kept: np.ndarray | None, *, single: bool = False
) -> tuple[SubmoduleStep | None, list[Touched]]:
    """What the node declares, and the resources that it touches. `single`: it is known that every row has one token.
    Raises `HookFailed`."""
    try:
        declared = node.submodule.declare_step(walk, rows, kept)
        return declared, [] if declared is None else touched_resources(node, declared, rows, single=single)
    except Exception as error:
        raise HookFailed(_message(node.submodule, "declare_step", walk, error)) from error


def touched_resources(node: NodeRuntime, declared: SubmoduleStep, rows: Rows, *, single: bool = False) -> list[Touched]:
    """The resources of a declared step in the node's order (caches before what reads them).

    Raises:
        LookupError: a key that the node does not declare, or attention without the cache it reads.
    """
    if unknown := declared.steps.keys() - node.resources.keys():
        raise LookupError(f"the step touches {sorted(unknown)}, not among the resources of node {node.name!r}")
    if declared.rows is not None and declared.rows is not rows:
        rows, single = declared.rows, False
    num_tokens, single = (rows.handles.size, True) if single else (rows.num_tokens, rows.single)
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
        raise HookFailed(_message(node.submodule, "can_batch", walk, error)) from error


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
        raise HookFailed(_message(submodule, "check_stop", walk, error)) from error
    return decisions


def _ask_rows(submodule: NodeSubmodule, walk: str, columns: RowColumns, failed: dict[int, str]) -> NodeBatch:
    """Row by row, for nodes without a columnar hook."""
    num_rows = columns.handles.size
    spans = np.zeros(num_rows, np.int32)
    kept = np.ones(num_rows, np.bool_)
    given: list[NodeInputs] = []
    for index in range(num_rows):
        try:
            row = submodule.prepare_inputs(walk, columns, index)
        except Exception as error:
            failed[int(columns.handles[index])] = _message(submodule, "prepare_inputs", walk, error)
            continue
        if row is None:
            spans[index] = -1
            continue
        spans[index] = row.span
        kept[index] = row.kept
        given.append(row)
    token_ids = [row.token_ids for row in given if row.token_ids is not None]
    names = dict.fromkeys(name for row in given for name in row.token_columns or ())
    token_columns = {
        name: np.concatenate(
            [
                np.full(row.span, -1, np.int32) if (column := (row.token_columns or {}).get(name)) is None else column
                for row in given
            ]
        )
        for name in names
    }
    return NodeBatch(
        spans, np.concatenate(token_ids) if token_ids else None, None if kept.all() else kept, token_columns
    )


def _check(node: NodeRuntime, columns: RowColumns, batch: NodeBatch) -> None:
    """What a hook may get wrong, before it becomes an index out of range. Raises `HookFailed`."""
    num_rows, spans, token_ids = columns.handles.size, batch.spans, batch.token_ids
    num_tokens = int(np.add.reduce(spans))
    name = type(node.submodule).__name__
    if len(spans) != num_rows or (token_ids is not None and len(token_ids) != num_tokens):
        if len(spans) == num_rows and (np.asarray(spans) < 0).any():
            return
        given = None if token_ids is None else len(token_ids)
        raise HookFailed(
            f"{name} gave {len(spans)} spans ({num_tokens} tokens) and {given} token ids for {num_rows} rows"
        )
    if token_ids is not None and node.sampler is None and num_tokens and np.min(token_ids) < 0:
        raise HookFailed(f"{name} reads live tokens, but node {node.name!r} has no sampler")
    if not batch.token_columns:
        return
    for column, values in batch.token_columns.items():
        if column not in node.submodule.token_columns:
            raise HookFailed(f"{name} gave token column {column!r}, not among its token_columns")
        if token_ids is None or len(values) != num_tokens:
            raise HookFailed(f"{name} gave {len(values)} entries of token column {column!r} for {num_tokens} tokens")


def _message(submodule: NodeSubmodule, hook: str, walk: str, error: Exception) -> str:
    """What a hook raised; its traceback goes to the log."""
    message = f"{type(submodule).__name__}.{hook} of walk {walk!r} raised {type(error).__name__}: {error}"
    log_fault(message, error)
    return message
