"""What a step that has ended leaves: failed rows, host copies, drawn tokens, outputs in the store. Loop thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from mstar.communication.tensor_store import TensorStore
from mstar.engine import resource_stages
from mstar.engine.execution import Step
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.resource_stages import ResourceFailed
from mstar.engine.step_plan import StepDone, StepPlan
from mstar.graph.protocol import NO_TENSOR


def collect_results(node: NodeRuntime, step: Step, plan: StepPlan, done: StepDone, store: TensorStore) -> None:
    """Fill `step.outputs` and `step.failed` from what the executor has left behind."""
    for begin, end in done.short_of_memory:
        message = f"the forward of {node.name} ran out of memory"
        step.failed.update(dict.fromkeys(step.handles[begin:end].tolist(), message))
    outputs = step.outputs
    outputs.host.update(done.host)
    if node.drawn is not None:
        _note_drawn(node, step, plan, done.resource_host)
    for item in plan.touched:
        try:
            step.failed.update(resource_stages.settle(item, done.resource_host, outputs))
        except ResourceFailed as error:
            step.fail_all(str(error))
    outputs.ids.update(dict.fromkeys(done.live))
    for name, value in done.stored.items():
        outputs.ids[name] = _put(store, value, plan)


def _note_drawn(node: NodeRuntime, step: Step, plan: StepPlan, host: Mapping[str, np.ndarray]) -> None:
    """Write down what was drawn, in case a row's cache has to be computed again."""
    assert node.drawn is not None and node.sampler is not None
    for item in plan.touched:
        if item.resource is node.sampler:
            handles, tokens = item.rows.handles, host[node.sampler.key + ".tokens"]
            draws = step.columns.num_draws[item.rows.places(step.handles)]
            node.drawn[handles, draws] = tokens  # rows that drew nothing will write theirs to the same place


def _put(store: TensorStore, value: Tensor | Sequence[Tensor | None], plan: StepPlan) -> np.ndarray:
    """Ids int64 [rows of the step] of an output of the finished rows; `NO_TENSOR` for the others."""
    if isinstance(value, Tensor):
        ids = store.put_batch(value)
    else:
        ids = np.array([NO_TENSOR if row is None else store.put(row) for row in value], np.int64)
    if plan.finished is None:
        return ids
    column = np.full(plan.rows.handles.size, NO_TENSOR, np.int64)
    column[plan.finished] = ids
    return column
