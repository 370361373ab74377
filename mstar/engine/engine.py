"""`Engine`: everything between "these rows run this node now" and "these tensors came out".

Called by the worker's loop thread only, in the order build → admit → plan → submit (→ draw) → finish → check_stop →
publish; `abandon` takes the place of submit. Device work goes through the executor. The engine chooses no rows, talks
to nobody and knows no graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mstar.communication.tensor_store import TensorStore
from mstar.engine import resource_stages
from mstar.engine.bucket_capture import Progress, Size, capture_bucket, capture_buckets
from mstar.engine.cache_reuse import settle_cache_policies
from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.cuda_graph_config import PackedCudaGraphConfig
from mstar.engine.device_graph import GraphMemory
from mstar.engine.drawn_text import text_rows, text_tokens
from mstar.engine.engine_config import EngineConfig
from mstar.engine.execution import AdmitOutcome, AllowedTokens, Portion, Step, StepPart, StepState
from mstar.engine.fault_log import log_fault
from mstar.engine.layer_handles import bind_layers
from mstar.engine.node_hooks import HookFailed, ask_check_stop
from mstar.engine.node_runtime import NodeRuntime, build_node
from mstar.engine.piecewise_capture import capture_regions
from mstar.engine.request_memory import RequestMemory
from mstar.engine.resource_set import build_resources
from mstar.engine.resource_stages import ResourceFailed
from mstar.engine.resources.base import Resource
from mstar.engine.row_table import RowTable
from mstar.engine.spec import NodeResourceSpec
from mstar.engine.step_builder import Built, StepBuilder
from mstar.engine.step_inputs import find_inputs
from mstar.engine.step_plan import StepPlan
from mstar.engine.step_planner import plan_step, release_slot
from mstar.engine.step_results import collect_results
from mstar.engine.step_runner import StepWork
from mstar.engine.submodule import NodeSubmodule, StopDecision
from mstar.engine.transaction import Transaction
from mstar.graph.protocol import NO_TENSOR, TakenRows
from mstar.platforms.executor import DeviceExecutor


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
        """Raises `ValueError` or `LookupError`, naming node, walk, layer and key, when declarations do not fit
        together."""
        local = [spec for spec in specs if spec.node in nodes]
        resources = build_resources(local, config)
        self._config = config
        self._store = store
        self._executor = executor
        self._rows = RowTable(config.capacity, config.max_seq_len)
        self._builder = StepBuilder(self._rows, config.max_seq_len)
        self._graph_memory = GraphMemory(config.device)
        self._undrawn: StepWork | None = None
        self._nodes: dict[str, NodeRuntime] = {}
        for name, submodule in nodes.items():
            own = resources.get(name, {})
            bind_layers(name, submodule, own)
            self._nodes[name] = build_node(name, submodule, own, self._rows, config)
        settle_cache_policies(self._nodes.values(), self._rows, config)
        self._resources: list[Resource] = list(
            {id(r): r for node in self._nodes.values() for r in node.resources.values()}.values()
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

    def policy(self, node: str, walk: str) -> ChunkingPolicy:
        """What the node declares about chunks of the walk."""
        return self._nodes[node].policies.of(walk)

    def pending_tokens(self, node: str, walk: str, handles: np.ndarray) -> np.ndarray:
        """int32 [rows], at least 1: tokens that the rows would compute next with room for all: what their cache lacks
        of its target where it is being restored, of the prompt otherwise; of what can be cut, not beyond the next place
        where the rows' states are to be kept."""
        runtime = self._nodes[node]
        if runtime.cache is None:
            return np.ones(handles.size, np.int32)
        lengths = runtime.cache.lengths[handles]
        pending = np.maximum(self._rows.num_prompt[handles] - lengths, 1)
        if (restoring := runtime.restoring(handles, lengths)) is not None:
            pending = np.where(restoring, runtime.cache.targets[handles] - lengths, pending)
        if (cuts := runtime.cache.holdings.tokens_to_cut(handles, lengths)) is not None:
            if runtime.policies.of(walk).chunked:
                return np.minimum(pending, cuts)
            if restoring is not None:
                return np.where(restoring, np.minimum(pending, cuts), pending)
        return pending

    def lengths(self, node: str, handles: np.ndarray) -> np.ndarray:
        """int32 [rows]: tokens in the rows' cache now; 0 in a node without one."""
        return self._nodes[node].lengths(handles)

    def restoring(self, node: str, handles: Sequence[int]) -> set[int]:
        """Rows whose cache lacks tokens that it held before; their steps compute those."""
        runtime = self._nodes[node]
        rows = np.array(handles, np.int64)
        restoring = runtime.restoring(rows, runtime.lengths(rows))
        return set() if restoring is None else set(rows[restoring].tolist())

    # a step

    def build(self, portions: Sequence[Portion | TakenRows]) -> Built:
        """One step of rows of one node, decode-like part first; and rows that compute nothing now (`declined`): with
        any there is no step, and the others are to be built again. A step whose `failed` is not empty cannot run."""
        given = [portion if isinstance(portion, Portion) else Portion(portion) for portion in portions]
        return self._builder.build(self._nodes[given[0].taken.key.node], given)

    def admit(self, step: Step) -> AdmitOutcome:
        """Reserve everything: one transaction, open until `submit` or `abandon`; a refusal leaves nothing. Neither does
        a resource that raises: its step cannot run, and has its rows in `failed`."""
        if step.state is not StepState.BUILT or step.txn is not None or step.failed:
            raise RuntimeError(
                f"a step is admitted once, in state built and without failed rows, not {step.state.value}"
            )
        plan = _plan_of(step)
        txn = Transaction()
        try:
            outcome = resource_stages.admit(plan, txn)
        except ResourceFailed as error:
            txn.rollback()
            step.fail_all(str(error))
            return AdmitOutcome()
        if outcome.ok:
            step.txn = txn
        else:
            txn.rollback()
        return outcome

    def plan(self, step: Step) -> None:
        """Write the step's block into a staging slot of its own, then move lengths and draw indices. A step whose node
        fails in a hook, or a resource in its part, is undone, with its rows in `failed`; one that failed in `admit` is
        left as it is."""
        if step.failed and step.txn is None:
            return
        if step.txn is None or step.state is not StepState.BUILT:
            raise RuntimeError(f"a step is planned once, after admission, not in state {step.state.value}")
        node = self._nodes[step.node]
        try:
            plan = _plan_of(step)
            plan.found = find_inputs(step.parts, self._store, plan.restoring)
            plan_step(node, plan, guard_device=self._config.debug_poison)
            resource_stages.advance(plan, step.txn)
        except (HookFailed, ResourceFailed) as error:
            self._drop(step)
            step.fail_all(str(error))
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

    def skip(self, step: Step) -> None:
        """Commit an armed step without computing it: its rows hold tokens that nobody has written. For requests that
        only measure what steps cost, and are closed without having published anything."""
        if step.state is not StepState.ARMED or step.txn is None:
            raise RuntimeError(f"only a planned step can be skipped, not one in state {step.state.value}")
        step.txn.commit()
        release_slot(self._nodes[step.node], _plan_of(step))
        step.state = StepState.ABANDONED

    def submit(self, step: Step, *, draw_later: bool = False) -> None:
        """Hand the step to the executor; its transaction commits. `step.event` fires when it has ended.

        `draw_later`: hand over the forward alone; `draw` must follow, before the next step is submitted."""
        if step.state is not StepState.ARMED or step.txn is None:
            raise RuntimeError(f"a step is submitted once, after planning, not in state {step.state.value}")
        if self._undrawn is not None:
            raise RuntimeError("the step that was submitted before has not drawn yet")
        node, plan = self._nodes[step.node], _plan_of(step)
        queued = [work for resource in node.resources.values() for work in resource.drain_work()]
        step.txn.commit()
        config = self._config
        work = StepWork(node, plan, queued, node.outputs.begin(), config.guard_outputs, config.debug_poison)
        step.state = StepState.SUBMITTED
        if draw_later:
            self._undrawn = work
        step.event = self._executor.submit(work.forward if draw_later else work)

    def draw(self, step: Step, allowed: AllowedTokens | None = None) -> None:
        """The second half of a step that was submitted with `draw_later`: its rows draw, those of `allowed` from the
        tokens given there. `step.event` fires when the step has ended, draw included. What `allowed` holds may be
        changed after the event."""
        work = self._undrawn
        if work is None or work.plan is not step.plan:
            raise RuntimeError("a step draws once, after it was submitted with `draw_later`")
        sampler = self._nodes[step.node].sampler
        if allowed is not None and (sampler is None or sampler.draws_in_forward):
            raise ValueError(f"node {step.node!r} has no sampler that draws behind the forward, from allowed tokens")
        self._undrawn = None
        step.event = self._executor.submit(lambda: work.draw(allowed))

    def finish(self, step: Step) -> None:
        """After the step's event: failed rows, host copies, and ids of the outputs in the store.

        Raises:
            torch.AcceleratorError: the device itself has failed, so no further step can run.
        """
        undrawn = self._undrawn is not None and self._undrawn.plan is step.plan
        if undrawn or step.state is not StepState.SUBMITTED or step.event is None or not step.event.done():
            raise RuntimeError(f"a step is finished once, after its event, not in state {step.state.value}")
        node, plan = self._nodes[step.node], _plan_of(step)
        release_slot(node, plan)
        step.state = StepState.DONE
        done = plan.done
        if step.event.error is not None or done is None:
            step.error = step.event.error
            if isinstance(step.error, torch.AcceleratorError):
                raise step.error
            why = f"the forward of {node.name} failed: {type(step.error).__name__}: {step.error}"
            if step.error is not None:
                log_fault(why, step.error)
            step.fail_all(why)
            return
        collect_results(node, step, plan, done, self._store)

    def draws(self, step: Step) -> np.ndarray:
        """bool [rows]: rows of a planned step that draw a token of text in it."""
        return text_rows(self._nodes[step.node].sampler, _plan_of(step), step.handles)

    def drawn(self, step: Step) -> np.ndarray:
        """int32 [rows]: what those rows have drawn, after `finish`."""
        return text_tokens(self._nodes[step.node].sampler, _plan_of(step), step.handles)

    def check_stop(self, step: Step) -> list[tuple[StepPart, StopDecision]]:
        """What the node's `check_stop` decides on the step's host rows, part by part; failed rows and those that draw
        only later are left out. A part whose hook fails is added to `failed`."""
        node = self._nodes[step.node]
        if step.error is not None:
            return []
        decisions: list[tuple[StepPart, StopDecision]] = []
        for part, columns in zip(step.parts, step.part_columns, strict=True):
            going = step.unfinished_in(part)
            if len(going) == len(part.taken.rows):
                continue
            host = {name: rows[part.begin : part.end] for name, rows in step.outputs.host.items()}
            try:
                answers = ask_check_stop(node, part.taken.key.walk, columns, host)
            except HookFailed as error:
                step.failed.update(dict.fromkeys(part.taken.rows, str(error)))
                continue
            for decision in answers:
                index = decision.index
                if going:
                    index = index[~np.isin(index, going)]
                if step.failed:
                    index = np.array(
                        [i for i in index.tolist() if int(columns.handles[i]) not in step.failed], np.int64
                    )
                if len(index):
                    decisions.append((part, StopDecision(index, decision.loop, decision.finish)))
        return decisions

    def publish(self, step: Step, keep: np.ndarray | None = None) -> None:
        """The step is routed. `keep` bool [rows]: rows that neither failed nor had stopped before it (None: all);
        outputs of the others leave the store. Where a resource raises, the kept rows are added to `failed`."""
        if step.error is not None:
            return
        for item in resource_stages.publishing(_plan_of(step)):
            chosen = None if keep is None else keep[item.rows.places(step.handles)]
            try:
                resource_stages.publish(item, chosen)
            except ResourceFailed as error:
                kept = item.rows.handles if chosen is None else item.rows.handles[chosen]
                step.failed.update(dict.fromkeys(kept.tolist(), str(error)))
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
        own = {name: value for resource in self._resources for name, value in resource.gauges().items()}
        return {**own, **self.memory.gauges()}

    def capture(self, progress: Progress | None = None) -> int:
        """Capture the declared walks and regions at the deployment's sizes; returns how many graphs there are. Raises
        `CaptureError`."""
        nodes = list(self._nodes.values())
        num_buckets = capture_buckets(nodes, self._builder, self._config, self._graph_memory, progress)
        return num_buckets + capture_regions(nodes, self._config, self._graph_memory, progress)

    def warmup(self) -> None:
        """Run every declared walk once over a sink row, so that the first request finds loaded code and grown pools,
        captured or not. Raises `CaptureError`."""
        for node in self._nodes.values():
            for declared in node.submodule.get_cuda_graph_configs():
                if not isinstance(declared, PackedCudaGraphConfig):
                    capture_bucket(node, declared, Size(1), self._builder, self._config, None)

    def _drop(self, step: Step) -> None:
        txn, step.txn = step.txn, None
        assert txn is not None
        txn.rollback()
        release_slot(self._nodes[step.node], _plan_of(step))


def _plan_of(step: Step) -> StepPlan:
    plan = step.plan
    if not isinstance(plan, StepPlan):
        raise RuntimeError("the step was not built by this engine, or a hook failed while it was built")
    return plan
