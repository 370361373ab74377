"""Faults in the hooks of a node and in the stages of its resources, on one real engine.

Objects get a class of their own, derived from theirs, whose hooks and stages ask the faults first; `clear` gives them
their class back. So what the engine decides by class (who overrides `publish`, who `can_batch`) is decided as for a
model that does override it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from support.faults.declared import HOOKS, STAGES, Call, Fault, strike_all

from mstar.engine.engine import Engine
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.resources.base import Resource
from mstar.engine.step_runner import StepWork
from mstar.engine.submodule import NodeBatch, NodeInputs, NodeSubmodule, RowColumns
from mstar.platforms.executor import DeviceEvent, Work
from mstar.worker.worker import WorkerParts


class EngineFaults:
    """Installs faults on the engine of `parts`. Hooks and stages run on the loop thread, forwards on the executor."""

    def __init__(self, parts: WorkerParts) -> None:
        self._engine: Engine = parts.engine
        self._rids = parts.teardown._rids
        self._original: dict[int, tuple[Any, type]] = {}
        self._faults: dict[int, list[Fault]] = {}
        self._running = np.empty(0, np.int64)
        """Handles of the step on the executor."""
        self._declared = np.empty(0, np.int64)
        """Handles of the step that was declared last: `can_batch` is asked about that one."""
        self._watch_executor()

    def add(self, fault: Fault, target: str) -> Fault:
        """`target`: a node for a hook, the key of a resource for a stage."""
        thing: Any = self._node(target).submodule if fault.place in HOOKS else self._resource(target)
        if id(thing) not in self._original:
            self._original[id(thing)] = (thing, type(thing))
            self._faults[id(thing)] = []
            places = HOOKS if fault.place in HOOKS else STAGES
            members = {place: self._guarded(thing, place) for place in places if place != "can_batch"}
            thing.__class__ = type(type(thing).__name__, (type(thing),), members)
        if fault.place == "can_batch":
            thing.__class__.can_batch = self._guarded(thing, "can_batch")
            self._node(target).asks_can_batch = True
        self._faults[id(thing)].append(fault)
        return fault

    def ask_row_by_row(self, node: str) -> None:
        """The node has no columnar hook any more: `prepare_inputs` is asked for each row and answers as that did."""
        submodule = self._node(node).submodule
        columnar = submodule.prepare_batch

        def prepare_inputs(self: NodeSubmodule, walk: str, rows: RowColumns, index: int) -> NodeInputs | None:
            batch = columnar(walk, rows)
            assert isinstance(batch, NodeBatch)
            begin = int(np.asarray(batch.spans[:index]).sum())
            span = int(batch.spans[index])
            ids = None if batch.token_ids is None else batch.token_ids[begin : begin + span]
            return NodeInputs(span, ids, batch.kept is None or bool(batch.kept[index]))

        members = {"prepare_batch": lambda self, walk, rows: None, "prepare_inputs": prepare_inputs}
        submodule.__class__ = type(type(submodule).__name__, (type(submodule),), members)

    def clear(self) -> None:
        """No fault strikes any more."""
        for thing, original in self._original.values():
            thing.__class__ = original
        self._original.clear()
        self._faults.clear()

    def _node(self, name: str) -> NodeRuntime:
        return self._engine._nodes[name]

    def _resource(self, key: str) -> Resource:
        for node in self._engine._nodes.values():
            if key in node.resources:
                return node.resources[key]
        raise LookupError(f"no node here has a resource {key!r}")

    def _call(self, walk: str, handles: np.ndarray, num_rows: int | None = None) -> Call:
        known = self._rids._rids
        rids = tuple(rid for handle in handles.tolist() if (rid := known[handle]) is not None)
        return Call(walk, rids, len(handles) if num_rows is None else num_rows)

    def _guarded(self, thing: Any, place: str) -> Callable[..., Any]:
        original = getattr(type(thing), place)

        def guarded(self: Any, *arguments: Any) -> Any:
            strike_all(faults(), place, call(*arguments))
            return original(self, *arguments)

        def faults() -> list[Fault]:
            return self._faults.get(id(thing), [])

        call = cast(Callable[..., Call], getattr(self, f"_of_{place}"))
        return guarded

    # what each call is about

    def _of_prepare_batch(self, walk: str, rows: RowColumns) -> Call:
        return self._call(walk, rows.handles)

    def _of_prepare_inputs(self, walk: str, rows: RowColumns, index: int) -> Call:
        return self._call(walk, rows.handles[index : index + 1])

    def _of_declare_step(self, walk: str, rows: Any, _kept: Any) -> Call:
        self._declared = rows.handles
        return self._call(walk, rows.handles)

    def _of_can_batch(self, walk: str, _shapes: Any) -> Call:
        return self._call(walk, self._declared)

    def _of_forward_batched(self, walk: str, inputs: Any) -> Call:
        return self._call(walk, self._running, inputs.num_rows)

    def _of_check_stop(self, walk: str, rows: RowColumns, _host: Any) -> Call:
        return self._call(walk, rows.handles)

    def _of_admit(self, _step: Any, ctx: Any, *_: Any) -> Call:
        return self._call("", ctx.rows.handles)

    def _of_plan(self, _step: Any, ctx: Any, *_: Any) -> Call:
        return self._call("", ctx.rows.handles)

    def _of_advance(self, _step: Any, ctx: Any, *_: Any) -> Call:
        return self._call("", ctx.rows.handles)

    def _of_settle(self, _plan: Any, rows: Any, *_: Any) -> Call:
        return self._call("", rows.handles)

    def _of_publish(self, _step: Any, rows: Any, *_: Any) -> Call:
        return self._call("", rows.handles)

    def _watch_executor(self) -> None:
        executor = self._engine._executor
        submit = executor.submit

        def watched(work: Work) -> DeviceEvent:
            if not isinstance(work, StepWork):
                return submit(work)

            def run() -> None:
                self._running = work.plan.rows.handles
                work()

            return submit(run)

        executor.submit = watched
