"""`Sampler`: draws one token per row from logits, and owns the live token column.

Control plane (loop thread): parameters and draw counts by handle (`SamplingColumns`), the plan of a step. Data plane
(executor): the live column, the parameter table, counts and biases; `SamplerLayer.sample` runs in forwards and takes
the largest logits, `draw` runs behind them for the rows that want anything else. A token depends on the row's logits,
parameters, seed and draw index, never on its neighbours.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mstar.communication.messages import SamplingParams
from mstar.engine.device_graph import DeviceGraph, GraphMemory, borrowed
from mstar.engine.execution import AllowedTokens, StepOutputs
from mstar.engine.host_columns import to_device
from mstar.engine.resources.base import OpenConfig, Resource, StepContext, Transaction, Work
from mstar.engine.resources.logit_adjust import TableRows, TokenBiases, TokenCounts
from mstar.engine.resources.logprobs import unpack
from mstar.engine.resources.row_draws import FAILED_TOKEN, DrawTables, row_draws
from mstar.engine.resources.sampling_columns import (
    BIAS,
    COUNT,
    SamplingColumns,
    check_prompt,
    check_sampling,
    without_text,
)
from mstar.engine.resources.sampling_plan import CapturedDraw, RowGroup, SamplingPlan, plan_sampling
from mstar.engine.spec import SamplerSpec
from mstar.engine.staging import StagingField
from mstar.engine.step import Rows, SamplerStep

log = logging.getLogger(__name__)

_NO_LOGITS = torch.empty((0, 0))

_NOT_FINITE = "the model's logits are not finite (NaN or infinity), or no token is left that may be drawn"
_NOT_WRITTEN = "what the request asks of the sampler could not be written to the device, which is short of memory"

_GROUP_FIELDS: Mapping[str, Mapping[str, Literal["int64", "float32"]]] = {
    "sampled": {"rows": "int64", "handles": "int64", "uniform": "float32"},
    "adjusted": {"rows": "int64", "handles": "int64", "counts": "int64", "biases": "int64", "floor": "float32"},
    "asked": {"rows": "int64"},
}


class Sampler(Resource[SamplerStep]):
    """`live` int64 [capacity + 1]: each handle's last token; the last entry is the sink's."""

    def __init__(self, spec: SamplerSpec, *, capacity: int, max_rows: int, device: torch.device) -> None:
        self.key = spec.key
        self._names = {
            group: {name: f"{spec.key}.{group}.{name}" for name in fields} for group, fields in _GROUP_FIELDS.items()
        }
        self.vocab_size = spec.vocab_size
        self._stream = 0 if spec.samples_text else zlib.crc32(spec.key.encode())
        self.samples_text = spec.samples_text
        self.draws_in_forward = spec.draws_in_forward
        self._plan = SamplingPlan(np.empty(0, np.int64), np.empty(0, np.bool_))
        self.columns = SamplingColumns(capacity + 1, spec.vocab_size)
        self.live = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self._sink = capacity
        self._device = device
        self._table = torch.from_numpy(self.columns.params.copy()).to(device)
        self._count_rows = TableRows(capacity + 1)
        self._bias_rows = TableRows(capacity + 1)
        self._counts = TokenCounts(spec.vocab_size, device)
        self._biases = TokenBiases(device)
        self._draws = row_draws(DrawTables(self._table, self._counts, self._biases), device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._fresh: dict[int, list[Work]] = {}
        """Opened since the last submit, with the resets of their table rows."""
        self._unwritten: set[int] = set()
        """Handles whose parameters or table rows are not those of their request (executor; `settle` asks after a step's
        event)."""
        self._staged: Mapping[str, Tensor] = {}
        self.drawn: Tensor = self._tokens[:0]
        """What the running step draws (executor); an output that is this very tensor stays in the live column."""
        self._logits = _NO_LOGITS
        self._graph: DeviceGraph | None = None
        self._logprobs: Tensor | None = None

    def open(self, handle: int, config: OpenConfig) -> None:
        params = config.sampling if self.samples_text else without_text(config.sampling)
        check_sampling(params, self.vocab_size)
        if self.samples_text and config.prompt_ids is not None:
            check_prompt(config.prompt_ids, self.vocab_size)
        self.columns.open(handle, params, self._stream)
        self._fresh[handle] = []
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            self._open_counts(handle, config.prompt_ids)
        if params.bias_ids or self.columns.min_tokens[handle] > 0:
            self._open_biases(handle, params)

    def cancel_open(self, handle: int) -> None:
        self.close(handle)

    def close(self, handle: int) -> None:
        self.columns.close(handle)
        self._fresh.pop(handle, None)
        self._count_rows.release(handle)
        self._bias_rows.release(handle)

    def plan(self, step: SamplerStep, ctx: StepContext) -> SamplingPlan:
        handles = ctx.rows.handles
        plan = plan_sampling(
            self.columns,
            handles,
            step.kept,
            self._count_rows.of,
            self._bias_rows.of,
            sorts_all=self._device.type != "cpu",
        )
        dst = ctx.staging[self.key + ".dst"]
        dst[: handles.size] = handles if step.kept is None else np.where(step.kept, handles, self._sink)
        if not plan.plain:
            for name, group in plan.groups().items():
                if group.size:
                    names = self._names[name]
                    ctx.staging[names["rows"]][: group.size] = group.rows
                    ctx.staging[names["rows"]][group.size :] = -1
                    for field, values in group.columns.items():
                        ctx.staging[names[field]][: group.size] = values
        return plan

    def capturable(self, plan: SamplingPlan, captured: SamplingPlan) -> bool:
        return plan.plain or not self.draws_in_forward

    def advance(self, step: SamplerStep, ctx: StepContext, txn: Transaction) -> None:
        handles = ctx.rows.handles if step.kept is None else ctx.rows.handles[step.kept]
        num_draws = self.columns.num_draws
        before = num_draws[handles]
        num_draws[handles] = before + 1

        def undo() -> None:
            num_draws[handles] = before

        txn.undo(undo)

    def settle(
        self, plan: SamplingPlan, rows: Rows, host: Mapping[str, np.ndarray], outputs: StepOutputs
    ) -> Mapping[int, str]:
        logprobs = host.get(self.key + ".logprobs")
        if plan.asked.size and logprobs is not None:  # None: memory ran out for each row that asked
            num_top = self.columns.num_logprobs[rows.handles[plan.asked.rows]]
            outputs.logprobs = unpack(plan.asked.rows, num_top, logprobs)
        failed = (host[self.key + ".tokens"] == FAILED_TOKEN) & plan.kept
        if not np.count_nonzero(failed):
            return {}
        return {
            handle: _NOT_WRITTEN if handle in self._unwritten else _NOT_FINITE
            for handle in rows.handles[failed].tolist()
        }

    def layer(self, index: int) -> SamplerLayer:
        return SamplerLayer(self)

    def staging_fields(self) -> Sequence[StagingField]:
        groups = (
            StagingField(self._names[group][name], dtype, "row", -1 if name == "rows" else 0)
            for group, fields in _GROUP_FIELDS.items()
            for name, dtype in fields.items()
        )
        return (StagingField(self.key + ".dst", "int64", "row", self._sink), *groups)

    def drain_work(self) -> Sequence[Work]:
        if not self._fresh:
            return ()
        fresh, self._fresh = self._fresh, {}
        handles = np.array(sorted(fresh), np.int64)
        values = self.columns.params[handles]
        params = partial(self._write, tuple(fresh), partial(self._write_params, handles, values))
        return [params, *(partial(self._write, (handle,), reset) for handle, of in fresh.items() for reset in of)]

    def begin_forward(self, plan: SamplingPlan, staging: Mapping[str, Tensor]) -> None:
        self._plan = plan
        self._staged = staging
        self._logprobs = None
        self._graph = None
        if not plan.staged:
            cut = (self._uploaded(group).items() for group in plan.groups().values())
            names = self._names.values()
            self._staged = {
                **staging,
                **{of[name]: x for of, fields in zip(names, cut, strict=True) for name, x in fields},
            }

    def begin_replay(self, plan: SamplingPlan, captured: SamplingPlan, staging: Mapping[str, Tensor]) -> None:
        self.begin_forward(plan, staging)
        assert captured.captured is not None
        self._logits, self.drawn, self._graph = captured.captured

    def end_forward(self, plan: SamplingPlan) -> None:
        self._write_live()

    def end_capture(self, plan: SamplingPlan, staging: Mapping[str, Tensor], memory: GraphMemory) -> None:
        logits, tokens = borrowed(self._logits), self.drawn
        everybody = SamplingPlan(plan.handles, plan.kept, cuts=True)
        fields = {name: staging[staged] for name, staged in self._names["sampled"].items()}

        def choose() -> None:
            self._draws.choose(logits, tokens, everybody, fields)
            self._write_live()

        graph = DeviceGraph(memory, choose) if memory.on_device and self._draws.capturable else None
        plan.captured = CapturedDraw(logits, tokens, graph)
        self._logits = _NO_LOGITS  # not before: the graph's own temporaries must lie elsewhere

    def draw(self, plan: SamplingPlan, allowed: AllowedTokens | None) -> None:
        if not self.draws_in_forward:
            self._draw(plan, allowed)

    def _draw(self, plan: SamplingPlan, allowed: AllowedTokens | None) -> None:
        logits, tokens, self._logits = self._logits, self.drawn, _NO_LOGITS
        if allowed is not None and not allowed.rows.size:
            allowed = None
        if plan.plain and allowed is None:
            return
        if self._unwritten:
            plan = self._without_unwritten(plan, tokens)
        asked = self._fields("asked", plan.asked)["rows"] if plan.asked.size else None
        adjusted: Mapping[str, Tensor] | None = None
        raw, raw_rows = logits, asked
        if allowed is not None or plan.adjusted.size:
            if asked is not None:
                raw, raw_rows = logits[asked], torch.arange(plan.asked.size, device=self._device)
            if allowed is not None:
                adjusted = self._uploaded(plan.adjusted_with(allowed.rows))
            else:
                adjusted = self._fields("adjusted", plan.adjusted)
            self._draws.adjust(logits, tokens, plan, adjusted, allowed)
        if plan.sampled.size and self._graph is not None:
            self._graph.replay()
        else:
            if plan.sampled.size:
                self._draws.choose(logits, tokens, plan, self._fields("sampled", plan.sampled))
            self._write_live()
        if plan.has_counts and plan.adjusted.size and adjusted is not None:
            self._counts.count(adjusted["counts"], tokens[adjusted["rows"]].long().clamp_(min=0))
        if asked is not None and raw_rows is not None:
            self._logprobs = self._draws.log_probabilities(raw, raw_rows, asked, tokens, plan.num_top)

    def _without_unwritten(self, plan: SamplingPlan, tokens: Tensor) -> SamplingPlan:
        """Rows fail that need what could not be written; the tables may not even have their rows."""
        needing = np.union1d(plan.sampled.rows, plan.adjusted.rows)
        failing = needing[np.isin(plan.handles[needing], list(self._unwritten))]
        if not failing.size:
            return plan
        tokens.index_fill_(0, to_device(failing, self._device), FAILED_TOKEN)
        plan = plan.unadjusted(failing)
        names = self._names["adjusted"]
        left = self._uploaded(plan.adjusted)
        self._staged = {**self._staged, **{names[name]: column for name, column in left.items()}}
        return plan

    def host_outputs(self, plan: SamplingPlan) -> Mapping[str, Tensor]:
        outputs = {self.key + ".tokens": self.drawn}
        if self._logprobs is not None:
            outputs[self.key + ".logprobs"] = self._logprobs
        return outputs

    def narrow(self, plan: SamplingPlan, begin: int, end: int) -> SamplingPlan:
        return plan.narrow(begin, end)

    def sample(self, logits: Tensor) -> Tensor:
        """See `mstar.engine.layer_handles.SamplerHandle.sample`."""
        self._logits, self.drawn = logits.float(), self._tokens[: logits.shape[0]]
        self._draws.largest(self._logits, self.drawn)
        if self.draws_in_forward and not self._plan.plain:
            self._draw(self._plan, None)
        return self.drawn

    def _write_live(self) -> None:
        self._draws.write_live(self.drawn, self._staged[self.key + ".dst"], self.live)

    def _fields(self, name: str, group: RowGroup) -> Mapping[str, Tensor]:
        """What was staged of a group."""
        return {field: self._staged[staged][: group.size] for field, staged in self._names[name].items()}

    def _uploaded(self, group: RowGroup) -> Mapping[str, Tensor]:
        """A group that was not staged."""
        columns = {"rows": group.rows, **group.columns}
        return {name: to_device(values, self._device) for name, values in columns.items()}

    def _open_counts(self, handle: int, prompt_ids: np.ndarray | None) -> None:
        row = self._count_rows.take(handle)
        self.columns.wants[handle] |= COUNT
        prompt = np.empty(0, np.int64) if prompt_ids is None else prompt_ids.astype(np.int64)
        self._fresh[handle].append(lambda: self._counts.reset(row, prompt))

    def _open_biases(self, handle: int, params: SamplingParams) -> None:
        row = self._bias_rows.take(handle)
        self.columns.wants[handle] |= BIAS
        ids = np.array(params.bias_ids, np.int64)
        values = np.array(params.bias_values, np.float32)
        floor_ids = np.array(params.stop_token_ids if params.min_tokens > 0 else (), np.int64)
        self._fresh[handle].append(lambda: self._biases.reset(row, ids, values, floor_ids))

    def _write_params(self, handles: np.ndarray, values: np.ndarray) -> None:
        self._unwritten.difference_update(handles.tolist())
        self._table[to_device(handles, self._device)] = to_device(values, self._device)

    def _write(self, handles: Sequence[int], write: Work) -> None:
        """Where memory runs out, the requests of `handles` fail when they draw, and no others."""
        lost = True
        try:
            write()
            lost = False
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, torch.AcceleratorError):
                raise
            log.warning("%s: what %d requests ask for could not be written: %s", self.key, len(handles), error)
        finally:
            if lost:
                self._unwritten.update(handles)


class SamplerLayer:
    """The layer handle (see `mstar.engine.layer_handles.SamplerHandle`)."""

    __slots__ = ("_sampler",)

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, logits: Tensor) -> Tensor:
        return self._sampler.sample(logits)

    def stopped(self, handles: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._sampler.columns.stopped(handles, tokens)
