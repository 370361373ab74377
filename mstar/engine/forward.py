"""Running a node's forward over staged tensors, eager, in pieces, or as a replay, and the draw behind it. Executor.

Touches the step's staged tensors, its inputs and the device-side state of its resources; no control column, no store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mstar.engine import node_runtime as fields
from mstar.engine.cuda_graph_runner import Bucket
from mstar.engine.device_graph import GraphMemory
from mstar.engine.execution import AllowedTokens
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.staging import narrow_staging
from mstar.engine.step_inputs import Found, ragged_inputs, stacked_inputs
from mstar.engine.step_plan import StepPlan
from mstar.engine.submodule import LIVE_TOKEN, EngineInputs, NodeOutputs
from mstar.engine.touched import Touched

log = logging.getLogger(__name__)

T = TypeVar("T")
Value = Tensor | Sequence[Tensor | None]


class Piece(NamedTuple):
    """Outputs of rows `begin:end`, of the node and for the resources."""

    begin: int
    end: int
    outputs: Mapping[str, Value]
    host: Mapping[str, Tensor]
    live: frozenset[str]


class StepResult(NamedTuple):
    """A step's outputs over its real rows. `live`: signals that are the sampler's tokens and nothing else."""

    outputs: Mapping[str, Value]
    host: Mapping[str, Tensor]
    live: frozenset[str]
    short_of_memory: list[tuple[int, int]]


class Undrawn(NamedTuple):
    """The forward of rows `begin:end` has run, and they have yet to draw. `touched`: the resources' plans of those
    rows. None for `outputs`: it did not fit into memory."""

    begin: int
    end: int
    outputs: NodeOutputs | None
    touched: Sequence[Touched]


def begin_eager(node: NodeRuntime, plan: StepPlan, staged: Mapping[str, Tensor], found: Found) -> Undrawn | None:
    """The step's forward at its exact size. None: it takes several, each of which draws before the next one runs; they
    are left to `end_eager`."""
    if len(plan.ranges) > 1:
        return None
    begin, end = plan.ranges[0]
    undrawn = _unless_short_of_memory(node, end - begin, lambda: _forward_range(node, plan, staged, found, begin, end))
    return undrawn or Undrawn(begin, end, None, ())


def end_eager(
    node: NodeRuntime,
    plan: StepPlan,
    staged: Mapping[str, Tensor],
    found: Found,
    begun: Undrawn | None,
    allowed: AllowedTokens | None,
) -> StepResult:
    """What `begin_eager` left to do. A range of rows that does not fit into memory is tried once more in two halves;
    not where it has states that the first try may have moved on."""
    pieces: list[Piece] = []
    lost: list[tuple[int, int]] = []
    repeatable = all(item.resource.repeatable for item in plan.touched)
    for begin, end in plan.ranges:
        piece = _try_range(node, plan, staged, found, begin, end, allowed, begun)
        if piece is not None:
            pieces.append(piece)
            continue
        if end - begin == 1 or not repeatable:
            lost.append((begin, end))
            continue
        middle = (begin + end + 1) // 2
        for half in ((begin, middle), (middle, end)):
            piece = _try_range(node, plan, staged, found, *half, allowed)
            if piece is None:
                lost.append(half)
            else:
                pieces.append(piece)
    num_rows = plan.rows.handles.size
    if not pieces:
        tried = f"also at half of its {num_rows} rows" if repeatable else f"with {num_rows} rows"
        raise MemoryError(f"the forward of {node.name} runs out of memory, {tried}")
    if len(pieces) == 1 and not lost:
        return StepResult(pieces[0].outputs, pieces[0].host, pieces[0].live, lost)
    outputs = {name: _join([(p.begin, p.end, p.outputs[name]) for p in pieces], num_rows) for name in pieces[0].outputs}
    names = dict.fromkeys(name for piece in pieces for name in piece.host)  # not every piece has rows that want each
    host = {
        name: _placed([(p.begin, p.end, p.host[name]) for p in pieces if name in p.host], num_rows) for name in names
    }
    return StepResult(outputs, host, pieces[0].live, lost)


def begin_bucket(
    node: NodeRuntime, plan: StepPlan, bucket: Bucket, staged: Mapping[str, Tensor], found: Found, *, poison: bool
) -> None:
    """The step's forward as a replay over the bucket's static buffers."""
    num_rows = plan.rows.handles.size
    values = stacked_inputs(found, lambda: _live(node, staged)[:num_rows]) if bucket.inputs else {}
    bucket.write_inputs({name: values[name] for name in bucket.inputs}, num_rows, poison=poison)
    for item in plan.touched:
        item.resource.begin_replay(item.facts, bucket.facts[item.resource.key], staged)
    bucket.graph.replay()


def end_bucket(node: NodeRuntime, plan: StepPlan, bucket: Bucket, allowed: AllowedTokens | None) -> StepResult:
    """The draw behind a replay."""
    num_rows = plan.rows.handles.size
    _draw(node, plan.touched, allowed)
    outputs = {name: tensor[:num_rows] for name, tensor in bucket.outputs.items()}
    return StepResult(outputs, _host_outputs(plan.touched, num_rows), bucket.live_signals, [])


def record_bucket(
    node: NodeRuntime, bucket: Bucket, staged: Mapping[str, Tensor], touched: list[Touched], memory: GraphMemory | None
) -> None:
    """Capture the forward of `bucket` over `staged`, all of it sink rows. `memory` None: run it, once, and no more."""
    for item in touched:
        item.resource.begin_forward(item.facts, staged)
    bucket.facts = {item.resource.key: item.facts for item in touched}
    key = bucket.key

    def run() -> None:
        tokens = _static_tokens(node, bucket, staged)
        columns = _token_columns(node, staged) if key.num_tokens else {}
        last, iterations = staged[fields.LAST], staged[fields.ITERATIONS]
        inputs = EngineInputs(key.bs, tokens, last, bucket.inputs, {}, iterations, columns)
        outputs = node.submodule.forward_batched(key.walk, inputs)
        for item in touched:
            item.resource.end_forward(item.facts)
        bucket.live_signals = _live_signals(node, outputs)
        for name, value in outputs.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{node.name}: output {name!r} of the captured walk {key.walk!r} is not one tensor")
            if name in bucket.live_signals:
                bucket.outputs[name] = value  # of the sampler: a draw behind the replay changes it
                continue
            if name not in bucket.outputs:
                bucket.outputs[name] = torch.empty_like(value)
            bucket.outputs[name].copy_(value)

    if memory is None:
        run()
        _draw(node, touched, None)
        return
    bucket.graph.capture(run, memory)
    for item in touched:
        item.resource.end_capture(item.facts, staged, memory)


def is_out_of_memory(error: BaseException) -> bool:
    """An accelerator's, Python's, or torch's CPU allocator's (which raises a plain RuntimeError)."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )


def _unless_short_of_memory(node: NodeRuntime, num_rows: int, run: Callable[[], T]) -> T | None:
    try:
        return run()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        log.warning("%s: out of memory with %d rows: %s", node.name, num_rows, error)
        return None


def _try_range(
    node: NodeRuntime,
    plan: StepPlan,
    staged: Mapping[str, Tensor],
    found: Found,
    begin: int,
    end: int,
    allowed: AllowedTokens | None,
    begun: Undrawn | None = None,
) -> Piece | None:
    """Forward, unless it has `begun`, and draw. None: out of memory."""

    def run() -> Piece | None:
        undrawn = begun or _forward_range(node, plan, staged, found, begin, end)
        return None if undrawn.outputs is None else _draw_range(node, plan, undrawn, undrawn.outputs, allowed)

    return _unless_short_of_memory(node, end - begin, run)


def _forward_range(
    node: NodeRuntime, plan: StepPlan, staged: Mapping[str, Tensor], found: Found, begin: int, end: int
) -> Undrawn:
    touched = plan.touched
    token_ids = plan.token_ids
    if (begin, end) != (0, plan.rows.handles.size):
        borders = np.concatenate([[0], np.cumsum(plan.rows.spans)])
        tokens = slice(int(borders[begin]), int(borders[end])) if token_ids is not None else slice(0, 0)
        staged = dict(narrow_staging(node.layouts.fields, staged, slice(begin, end), tokens))
        staged[fields.LAST] = staged[fields.LAST] - tokens.start
        token_ids = None if token_ids is None else token_ids[tokens]
        found = {name: value.narrow(slice(begin, end)) for name, value in found.items()}
        touched = [replace(item, facts=item.resource.narrow(item.facts, begin, end)) for item in touched]
    for item in touched:
        item.resource.begin_forward(item.facts, staged)
    outputs = node.submodule.forward_batched(plan.walk, _inputs(node, plan, staged, found, token_ids, end - begin))
    _check_rows(node, outputs, end - begin)
    for item in touched:
        item.resource.end_forward(item.facts)
    return Undrawn(begin, end, outputs, touched)


def _draw_range(
    node: NodeRuntime, plan: StepPlan, undrawn: Undrawn, outputs: NodeOutputs, allowed: AllowedTokens | None
) -> Piece:
    begin, end, _, touched = undrawn
    alone = (begin, end) == (0, plan.rows.handles.size)
    _draw(node, touched, allowed if alone or allowed is None else allowed.narrow(begin, end))
    live = _live_signals(node, outputs)
    host = _host_outputs(touched, end - begin)
    if alone:
        return Piece(begin, end, outputs, host, live)
    # The next piece overwrites the resources' buffers.
    kept = {name: value.clone() if isinstance(value, Tensor) else value for name, value in outputs.items()}
    return Piece(begin, end, kept, {name: value.clone() for name, value in host.items()}, live)


def _draw(node: NodeRuntime, touched: Sequence[Touched], allowed: AllowedTokens | None) -> None:
    for item in touched:
        item.resource.draw(item.facts, allowed if item.resource is node.sampler else None)


def _inputs(
    node: NodeRuntime,
    plan: StepPlan,
    staged: Mapping[str, Tensor],
    found: Found,
    token_ids: np.ndarray | None,
    num_rows: int,
) -> EngineInputs:
    def live() -> Tensor:
        return _live(node, staged)

    return EngineInputs(
        num_rows=num_rows,
        tokens=None if token_ids is None else _tokens(node, plan, staged, token_ids),
        last=None if token_ids is None else staged[fields.LAST],
        tensors=stacked_inputs(found, live),
        ragged=ragged_inputs(found, live),
        iterations=staged[fields.ITERATIONS],
        token_columns={} if token_ids is None else _token_columns(node, staged),
    )


def _token_columns(node: NodeRuntime, staged: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: staged[fields.column_field(name)] for name in node.submodule.token_columns}


def _live(node: NodeRuntime, staged: Mapping[str, Tensor]) -> Tensor:
    """Live token of each row, int64 [rows]."""
    if node.sampler is None:
        raise LookupError(f"node {node.name!r} reads live tokens, but has no sampler")
    return node.sampler.live.index_select(0, staged[fields.HANDLES])


def _tokens(node: NodeRuntime, plan: StepPlan, staged: Mapping[str, Tensor], token_ids: np.ndarray) -> Tensor:
    if plan.live_only:
        return _live(node, staged)
    ids = staged[fields.TOKEN_IDS]
    if node.sampler is None or not (token_ids == LIVE_TOKEN).any():
        return ids
    return torch.where(ids < 0, node.sampler.live.index_select(0, staged[fields.TOKEN_HANDLES]), ids)


def _static_tokens(node: NodeRuntime, bucket: Bucket, staged: Mapping[str, Tensor]) -> Tensor | None:
    """Of a bucket: the rows' live tokens or, where they are packed, whatever was staged."""
    if not bucket.key.num_tokens:
        return None
    if bucket.key.q_len:
        return _live(node, staged)
    ids = staged[fields.TOKEN_IDS]
    if node.sampler is None:
        return ids
    return torch.where(ids < 0, node.sampler.live.index_select(0, staged[fields.TOKEN_HANDLES]), ids)


def _live_signals(node: NodeRuntime, outputs: NodeOutputs) -> frozenset[str]:
    if node.sampler is None:
        return frozenset()
    return frozenset(name for name, value in outputs.items() if value is node.sampler.drawn)


def _host_outputs(touched: Sequence[Touched], num_rows: int) -> dict[str, Tensor]:
    return {
        name: value[:num_rows] for item in touched for name, value in item.resource.host_outputs(item.facts).items()
    }


def _check_rows(node: NodeRuntime, outputs: NodeOutputs, num_rows: int) -> None:
    for name, value in outputs.items():
        if len(value) != num_rows:
            raise ValueError(f"{node.name}: output {name!r} has {len(value)} rows for a step of {num_rows}")


def _join(pieces: Sequence[tuple[int, int, Value]], num_rows: int) -> Value:
    """One output over all rows of the step; rows that were lost are zero, or absent where rows differ in shape."""
    tensors = [(begin, end, value) for begin, end, value in pieces if isinstance(value, Tensor)]
    if len(tensors) == len(pieces) and len({value.shape[1:] for _, _, value in tensors}) == 1:
        return _placed(tensors, num_rows)
    rows: list[Tensor | None] = [None] * num_rows
    for begin, end, value in pieces:
        rows[begin:end] = list(value)
    return rows


def _placed(pieces: Sequence[tuple[int, int, Tensor]], num_rows: int) -> Tensor:
    first = pieces[0][2]
    whole = first.new_zeros((num_rows, *first.shape[1:]))
    for begin, end, value in pieces:
        whole[begin:end].copy_(value)
    return whole
