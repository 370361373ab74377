"""`Engine`: everything between "these rows run this node now" and "these tensors came out".

Called by the worker's loop thread only, in the order build → admit → plan → submit → finish → check_stop → publish;
`abandon` takes the place of submit. Device work goes through the executor. The engine chooses no rows, talks to nobody
and knows no graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
from torch import Tensor

from mstar.communication.tensor_store import TensorStore
from mstar.engine import node_runtime as fields
from mstar.engine.bucket_capture import Progress, capture_bucket, capture_buckets
from mstar.engine.engine_config import EngineConfig
from mstar.engine.execution import AdmitOutcome, Step, StepPart, StepState
from mstar.engine.layer_handles import bind_layers
from mstar.engine.node_runtime import NodeRuntime, build_node
from mstar.engine.request_memory import RequestMemory
from mstar.engine.resource_set import build_resources
from mstar.engine.resources.base import Resource
from mstar.engine.row_table import RowTable
from mstar.engine.spec import NodeResourceSpec
from mstar.engine.staging import NoDeviceCopies, StepShape, fill_padding
from mstar.engine.step import Rows
from mstar.engine.step_builder import HookFailed, StepBuilder, ask_can_batch, ask_check_stop, slice_columns
from mstar.engine.step_inputs import find_inputs, row_shapes
from mstar.engine.step_plan import StepPlan
from mstar.engine.step_runner import StepWork
from mstar.engine.submodule import NodeSubmodule, StopDecision
from mstar.engine.transaction import Transaction
from mstar.graph.protocol import NO_TENSOR, TakenRows
from mstar.platforms.executor import DeviceExecutor

_PAGE_STRIDE = 8
"""Tables of eager steps are as wide as the longest row, rounded up, so that shapes repeat."""


class Engine:
    """See the module docstring. Construction allocates every resource and binds the layers of every node."""

    def __init__(
        self,
        nodes: Mapping[str, NodeSubmodule],
        specs: Sequence[NodeResourceSpec],
        store: TensorStore,
        executor: DeviceExecutor,
        config: EngineConfig,
    ) -> None:
        """Raises `ValueError` or `LookupError`, naming node, layer and key, when declarations do not fit together."""
        local = [spec for spec in specs if spec.node in nodes]
        resources = build_resources(local, config)
        self._config = config
        self._store = store
        self._executor = executor
        self._rows = RowTable(config.capacity)
        self._builder = StepBuilder(self._rows, config.max_seq_len)
        self._nodes: dict[str, NodeRuntime] = {}
        for name, submodule in nodes.items():
            own = resources.get(name, {})
            bind_layers(name, submodule, own)
            self._nodes[name] = build_node(name, submodule, own, config)
        self._resources: list[Resource] = list(
            {key: r for own in resources.values() for key, r in own.items()}.values()
        )
        self.memory = RequestMemory(
            self._resources,
            {name: node.cache for name, node in self._nodes.items() if node.cache is not None},
            self._rows,
            config.max_seq_len,
        )
        """What requests hold here."""

    # requests and nodes

    def max_rows(self, node: str) -> int:
        """Rows that one step of the node may have."""
        limit = self._nodes[node].submodule.max_rows
        return self._config.max_rows if limit is None else min(limit, self._config.max_rows)

    def pending_tokens(self, node: str, handles: np.ndarray) -> np.ndarray:
        """int [rows]: tokens that the rows' next step computes, at least 1: what their cache lacks of the prompt."""
        runtime = self._nodes[node]
        if runtime.cache is None:
            return np.ones(handles.size, np.int32)
        return np.maximum(self._rows.num_prompt[handles] - runtime.cache.lengths[handles], 1)

    # a step

    def build(self, taken: Sequence[TakenRows]) -> tuple[Step | None, list[int]]:
        """One step of rows of one node, decode-like part first; and rows that compute nothing now (`declined`): with
        any there is no step, and the others are to be built again. A step whose `failed` is not empty cannot run."""
        return self._builder.build(self._nodes[taken[0].key.node], taken)

    def admit(self, step: Step) -> AdmitOutcome:
        """Reserve everything: one transaction, open until `submit` or `abandon`; a refusal leaves nothing."""
        if step.state is not StepState.BUILT or step.txn is not None or step.failed:
            raise RuntimeError(
                f"a step is admitted once, in state built and without failed rows, not {step.state.value}"
            )
        plan = _plan_of(step)
        txn = Transaction()
        try:
            for item in plan.touched:
                outcome = item.resource.admit(item.step, item.context({}, plan.shape), txn)
                if not outcome.ok:
                    txn.rollback()
                    return outcome
        except BaseException:
            if txn.open:
                txn.rollback()
            raise
        step.txn = txn
        return AdmitOutcome()

    def plan(self, step: Step) -> None:
        """Write the step's block into a staging slot of its own, then move lengths and draw indices. A step whose node
        fails in a hook is undone, with its rows in `failed`."""
        if step.txn is None or step.state is not StepState.BUILT:
            raise RuntimeError(f"a step is planned once, after admission, not in state {step.state.value}")
        node = self._nodes[step.node]
        try:
            plan = _plan_of(step)
            plan.found = find_inputs(step.parts, self._store)
            self._plan(node, plan)
            for item in plan.touched:
                item.resource.advance(item.step, item.context({}, plan.shape), step.txn)
        except HookFailed as error:
            self._drop(step)
            step.failed.update(dict.fromkeys(step.handles.tolist(), str(error)))
            return
        except BaseException:
            self._drop(step)
            raise
        step.state = StepState.ARMED

    def abandon(self, step: Step) -> None:
        """Undo an admitted step, exactly once: pages, lengths, draw counts and the staging slot are as before it."""
        if step.txn is None or step.state not in (StepState.BUILT, StepState.ARMED):
            raise RuntimeError(
                f"only an admitted step that was not submitted is abandoned, not one in {step.state.value}"
            )
        self._drop(step)
        step.state = StepState.ABANDONED

    def submit(self, step: Step) -> None:
        """Hand the step to the executor; its transaction commits. `step.event` fires when it has ended."""
        if step.state is not StepState.ARMED or step.txn is None:
            raise RuntimeError(f"a step is submitted once, after planning, not in state {step.state.value}")
        node, plan = self._nodes[step.node], _plan_of(step)
        queued = [work for resource in node.resources.values() for work in resource.drain_work()]
        step.txn.commit()
        config = self._config
        work = StepWork(node, plan, queued, node.outputs.begin(), config.guard_outputs, config.debug_poison)
        step.state = StepState.SUBMITTED
        step.event = self._executor.submit(work)

    def finish(self, step: Step) -> None:
        """After the step's event: failed rows, host copies, and ids of the outputs in the store."""
        if step.state is not StepState.SUBMITTED or step.event is None or not step.event.done():
            raise RuntimeError(f"a step is finished once, after its event, not in state {step.state.value}")
        node, plan = self._nodes[step.node], _plan_of(step)
        self._release_slot(node, plan)
        step.state = StepState.DONE
        done = plan.done
        if step.event.error is not None or done is None:
            step.error = step.event.error
            message = f"the forward of {node.name} failed: {type(step.error).__name__}: {step.error}"
            step.failed.update(dict.fromkeys(step.handles.tolist(), message))
            return
        for begin, end in done.short_of_memory:
            message = f"the forward of {node.name} ran out of memory"
            step.failed.update(dict.fromkeys(step.handles[begin:end].tolist(), message))
        outputs = step.outputs
        outputs.host.update(done.host)
        for item in plan.touched:
            step.failed.update(item.resource.settle(item.facts, item.rows, done.resource_host, outputs))
        outputs.ids.update(dict.fromkeys(done.live))
        for name, value in done.stored.items():
            outputs.ids[name] = self._put(value)

    def check_stop(self, step: Step) -> list[tuple[StepPart, StopDecision]]:
        """What the node's `check_stop` decides on the step's host rows, part by part; failed rows are left out. A part
        whose hook fails is added to `failed`."""
        node = self._nodes[step.node]
        if step.error is not None:
            return []
        decisions: list[tuple[StepPart, StopDecision]] = []
        for part in step.parts:
            whole = len(step.parts) == 1
            columns = step.columns if whole else slice_columns(step.columns, part)
            host = step.outputs.host
            if not whole:
                host = {name: rows[part.begin : part.end] for name, rows in host.items()}
            try:
                answers = ask_check_stop(node, part.taken.key.walk, columns, host)
            except HookFailed as error:
                step.failed.update(dict.fromkeys(part.taken.rows, str(error)))
                continue
            for decision in answers:
                index = decision.index
                if step.failed:
                    index = np.array(
                        [i for i in index.tolist() if int(columns.handles[i]) not in step.failed], np.int64
                    )
                if len(index):
                    decisions.append((part, StopDecision(index, decision.loop, decision.finish)))
        return decisions

    def publish(self, step: Step, keep: np.ndarray | None = None) -> None:
        """The step is routed. `keep` bool [rows]: rows that neither failed nor had stopped before it (None: all);
        outputs of the others leave the store."""
        if step.error is not None:
            return
        for item in _plan_of(step).touched:
            if type(item.resource).publish is not Resource.publish:
                rows = item.rows
                if keep is not None:
                    chosen = keep[np.isin(step.handles, rows.handles)]
                    rows = Rows(rows.handles[chosen], rows.spans[chosen], rows.label)
                item.resource.publish(item.step, rows)
        if keep is not None and not keep.all():
            for ids in step.outputs.ids.values():
                if ids is not None:
                    unwanted = ids[~keep]
                    self._store.free(unwanted[unwanted != NO_TENSOR])

    def close_executor(self) -> None:
        """The worker ends: what was submitted is finished first."""
        self._executor.close()

    # facts and start-up

    def gauges(self) -> dict[str, float]:
        """Prometheus names with labels to values."""
        return {name: value for resource in self._resources for name, value in resource.gauges().items()}

    def capture(self, progress: Progress | None = None) -> int:
        """Capture the declared walks at the deployment's sizes; returns how many. Raises `CaptureError`."""
        return capture_buckets(list(self._nodes.values()), self._builder, self._config, progress)

    def warmup(self) -> None:
        """Run every declared walk once over a sink row, so that the first request finds loaded code and grown pools."""
        for node in self._nodes.values():
            for declared in node.submodule.get_cuda_graph_configs():
                capture_bucket(node, declared, 1, self._builder, self._config)

    def _plan(self, node: NodeRuntime, plan: StepPlan) -> None:
        num_rows = plan.rows.handles.size
        plan.ranges = ((0, num_rows),)
        if node.asks_can_batch and num_rows > 1:
            if not ask_can_batch(node, plan.walk, row_shapes(plan.found, num_rows)):
                plan.ranges = tuple((row, row + 1) for row in range(num_rows))
        if len(plan.ranges) == 1 and (plan.token_ids is None or plan.live_only):
            bucket = node.graphs.lookup(plan.walk, plan.cg_key_info, num_rows)
            plan.bucket = bucket if bucket is not None and bucket.accepts(plan.found) else None
        self._stage(node, plan)
        if plan.bucket is not None and not plan.bucket.replays(plan.touched):
            self._release_slot(node, plan)
            plan.bucket = None
            self._stage(node, plan)

    def _stage(self, node: NodeRuntime, plan: StepPlan) -> None:
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
        self._stage_rows(plan, views)
        for item in plan.touched:
            guard = self._config.debug_poison and not item.resource.force_double_buffer
            with NoDeviceCopies(item.resource.key) if guard else nullcontext():
                item.facts = item.resource.plan(item.step, item.context(views, plan.shape))

    def _stage_rows(self, plan: StepPlan, views: Mapping[str, np.ndarray]) -> None:
        """What the engine itself stages: handles, token ids, last tokens, iterations."""
        handles, spans, _ = plan.rows
        num_rows = handles.size
        views[fields.HANDLES][:num_rows] = handles
        views[fields.ITERATIONS][:num_rows] = plan.iterations
        last = views[fields.LAST]
        if plan.token_ids is None or plan.live_only:
            last[:] = np.arange(last.size)
            return
        np.cumsum(spans, out=last[:num_rows])
        np.maximum(last[:num_rows] - 1, 0, out=last[:num_rows])
        views[fields.TOKEN_IDS][: plan.num_tokens] = plan.token_ids
        views[fields.TOKEN_HANDLES][: plan.num_tokens] = np.repeat(handles, spans)

    def _drop(self, step: Step) -> None:
        txn, step.txn = step.txn, None
        assert txn is not None
        txn.rollback()
        self._release_slot(self._nodes[step.node], _plan_of(step))

    @staticmethod
    def _release_slot(node: NodeRuntime, plan: StepPlan) -> None:
        if plan.slot is not None:
            node.staging.release(plan.slot)
            plan.slot = None

    def _put(self, value: Tensor | Sequence[Tensor | None]) -> np.ndarray:
        if isinstance(value, Tensor):
            return self._store.put_batch(value)
        return np.array([NO_TENSOR if row is None else self._store.put(row) for row in value], np.int64)


def _plan_of(step: Step) -> StepPlan:
    plan = step.plan
    if not isinstance(plan, StepPlan):
        raise RuntimeError("the step was not built by this engine, or a hook failed while it was built")
    return plan
