"""Writes a step's block into a staging slot: chooses its bucket, its layout, and lets every resource stage its part.

Loop thread, host integers. The slot is the step's until `release_slot`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mstar.engine import node_runtime as fields
from mstar.engine import resource_stages
from mstar.engine.node_hooks import ask_can_batch
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.staging import StepShape, fill_padding
from mstar.engine.step_inputs import row_shapes
from mstar.engine.step_plan import StepPlan

_PAGE_STRIDE = 8
"""Tables of eager steps are as wide as the longest row, rounded up, so that shapes repeat."""


def plan_step(node: NodeRuntime, plan: StepPlan, *, guard_device: bool) -> None:
    """Stage the step, for a bucket where one fits. `guard_device`: a resource that reaches the device meanwhile fails.

    Raises:
        HookFailed, ResourceFailed: with the slot taken; `release_slot` gives it back.
    """
    num_rows = plan.rows.handles.size
    plan.ranges = ((0, num_rows),)
    if node.asks_can_batch and num_rows > 1:
        if not ask_can_batch(node, plan.walk, row_shapes(plan.found, num_rows)):
            plan.ranges = tuple((row, row + 1) for row in range(num_rows))
    if len(plan.ranges) == 1 and (plan.token_ids is None or plan.live_only):
        bucket = node.graphs.lookup(plan.walk, plan.cg_key_info, num_rows)
        plan.bucket = bucket if bucket is not None and bucket.accepts(plan.found) else None
    elif len(plan.ranges) == 1 and not plan.accumulating and all(value.is_live for value in plan.found.values()):
        plan.bucket = node.graphs.lookup_packed(plan.walk, plan.cg_key_info, num_rows, plan.num_tokens)
    _stage(node, plan, guard_device)
    if plan.bucket is not None and not plan.bucket.replays(plan.touched):
        release_slot(node, plan)
        plan.bucket = None
        _stage(node, plan, guard_device)


def release_slot(node: NodeRuntime, plan: StepPlan) -> None:
    """The step has ended or will not run."""
    if plan.slot is not None:
        node.staging.release(plan.slot)
        plan.slot = None


def _stage(node: NodeRuntime, plan: StepPlan, guard_device: bool) -> None:
    """Write the step's block, for its bucket or at its own size."""
    num_rows, num_tokens = plan.rows.handles.size, plan.num_tokens
    if plan.bucket is not None:
        plan.layout = plan.bucket.layout
    else:
        pages = max((item.resource.num_pages(item.step, item.rows) for item in plan.touched), default=0)
        pages = -(-pages // _PAGE_STRIDE) * _PAGE_STRIDE
        plan.layout = node.layouts.layout(StepShape(num_rows, num_tokens, pages))
    plan.shape = plan.layout.shape
    plan.slot = node.staging.acquire()
    views = plan.slot.views(plan.layout)
    if plan.bucket is not None:
        fill_padding(plan.layout, views, num_rows, num_tokens)
    _stage_rows(plan, views)
    resource_stages.stage(plan, views, guard_device=guard_device)


def _stage_rows(plan: StepPlan, views: Mapping[str, np.ndarray]) -> None:
    """What the engine itself stages: handles, token ids and columns, last tokens, iterations."""
    handles, spans, _ = plan.rows
    num_rows = handles.size
    views[fields.HANDLES][:num_rows] = handles
    views[fields.ITERATIONS][:num_rows] = plan.iterations
    for name, values in plan.token_columns.items():
        views[fields.column_field(name)][: plan.num_tokens] = values
    last = views[fields.LAST]
    if plan.token_ids is None or plan.live_only:
        last[:] = np.arange(last.size)
        return
    np.maximum(spans.cumsum() - 1, 0, out=last[:num_rows])
    views[fields.TOKEN_IDS][: plan.num_tokens] = plan.token_ids
    views[fields.TOKEN_HANDLES][: plan.num_tokens] = handles.repeat(spans)
