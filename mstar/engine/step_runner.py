"""`StepWork`: what the executor does for one step, from upload to the copies of the outputs.

Made on the loop thread at submit, called on the executor, once or in its two halves. It reads the step's plan, its
staging slot and the tensors handed in; it writes device-side state of the node's resources, the output slot, and
finally `plan.done`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mstar.engine.execution import AllowedTokens
from mstar.engine.forward import StepResult, Undrawn, Value, begin_bucket, begin_eager, end_bucket, end_eager
from mstar.engine.host_columns import to_device
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.output_ring import OutputSlot
from mstar.engine.resources.base import Work
from mstar.engine.step_plan import StepDone, StepPlan


@dataclass(slots=True)
class StepWork:
    """See the module docstring. `queued`: device work of the resources that comes before the forward, also for rows of
    later steps. Called as a whole or, where what rows may draw is not known yet, as `forward` and later `draw`."""

    node: NodeRuntime
    plan: StepPlan
    queued: Sequence[Work]
    slot: OutputSlot
    guard_outputs: bool
    poison: bool
    staged: Mapping[str, Tensor] = field(default_factory=dict)
    begun: Undrawn | None = None
    failure: BaseException | None = None
    """What `forward` raised."""

    def __call__(self) -> None:
        self.forward()
        self.draw(None)

    @torch.inference_mode()
    def forward(self) -> None:
        """Everything up to the logits."""
        try:
            with ExitStack() as every:  # whatever one raises, the others run
                for work in reversed(self.queued):
                    every.callback(work)
            node, plan = self.node, self.plan
            assert plan.slot is not None and plan.layout is not None
            block = node.block if plan.bucket is None else plan.bucket.block
            self.staged = block.upload(plan.slot, plan.layout)
            if plan.bucket is None:
                self.begun = begin_eager(node, plan, self.staged, plan.found)
            else:
                begin_bucket(node, plan, plan.bucket, self.staged, plan.found, poison=self.poison)
        except BaseException as error:
            self.failure = error
            raise

    @torch.inference_mode()
    def draw(self, allowed: AllowedTokens | None) -> None:
        """Tokens, and the copies of the outputs."""
        if self.failure is not None:
            raise self.failure
        node, plan = self.node, self.plan
        if plan.bucket is None:
            result = end_eager(node, plan, self.staged, plan.found, self.begun, allowed)
        else:
            result = end_bucket(node, plan, plan.bucket, allowed)
        for item in plan.touched:
            item.resource.after_forward(item.facts)
        plan.done = self._copy_out(result)

    def _copy_out(self, result: StepResult) -> StepDone:
        """The step's last operation: whatever is read after the next submit is copied now."""
        node = self.node
        live = result.live - node.stored_signals
        resource_host = {name: self._host(name, value) for name, value in result.host.items()}
        host: dict[str, np.ndarray] = {}
        for name in node.submodule.host_signals & result.outputs.keys():
            value = result.outputs[name]
            if name in result.live and node.sampler is not None:
                host[name] = resource_host[node.sampler.key + ".tokens"]
            elif isinstance(value, Tensor):
                host[name] = self._host(name, value)
            else:
                raise TypeError(f"{node.name}: host signal {name!r} must be one tensor [rows, ...]")
        outputs = self._joined(result.outputs) if self.plan.accumulating else result.outputs
        stored = {name: self._kept(self._finished(value)) for name, value in outputs.items() if name not in live}
        return StepDone(host, resource_host, stored, live, result.short_of_memory)

    def _joined(self, outputs: Mapping[str, Value]) -> Mapping[str, Value]:
        """Outputs that grow over chunks, put aside for rows that go on and joined for those that end. They come out by
        row."""
        chunks, finished = self.node.chunk_outputs, self.plan.finished
        assert chunks is not None
        ends = np.ones(self.plan.rows.handles.size, np.bool_)
        if finished is not None:
            ends[:] = False
            ends[finished] = True
        joined = dict(outputs)
        for signals, rows, begins in self.plan.accumulating:
            for name in sorted(signals & joined.keys()):
                pieces = list(joined[name])
                for row in rows.tolist():
                    handle, begin, piece = int(self.plan.rows.handles[row]), int(begins[row]), pieces[row]
                    if piece is None:
                        continue
                    if ends[row]:
                        pieces[row] = chunks.join(handle, name, begin, piece)
                    else:
                        chunks.keep(handle, name, begin, piece)
                joined[name] = pieces
        return joined

    def _finished(self, value: Value) -> Value:
        """The output of the rows that end with this step: what others make leads nowhere."""
        finished = self.plan.finished
        if finished is None:
            return value
        if isinstance(value, Tensor):
            return value.index_select(0, to_device(finished, value.device))
        return [value[row] for row in finished.tolist()]

    def _host(self, name: str, value: Tensor) -> np.ndarray:
        if self.guard_outputs:
            return self.slot.copy(name, value)
        return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()

    def _kept(self, value: Value) -> Value:
        if not self.guard_outputs:
            return value
        if isinstance(value, Tensor):
            return value.clone()
        return [None if row is None else row.clone() for row in value]
