"""The worker's outbox: what a step's routing becomes on the wire, one message per destination and step.

Runs on the worker's loop thread, last in `route`. Emitted tokens ride inline from the step's host rows; tensors are
read from the store, and what nobody references any more is freed behind the frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstar.communication import host_tensors
from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.bus import Bus
from mstar.communication.messages import (
    EmitFrame,
    Fail,
    HostTensor,
    Message,
    Opened,
    StepReport,
    TokenLogprobs,
    WalkDone,
)
from mstar.communication.tensor_store import TensorStore
from mstar.communication.transport import Transport
from mstar.engine.execution import Step
from mstar.graph.protocol import LIVE_COLUMN, EmitColumns, Routed
from mstar.worker.requests import RequestTable
from mstar.worker.rid_table import RidTable


class Outbox:
    """Frames to the front and to peer workers."""

    def __init__(
        self,
        *,
        bus: Bus,
        rids: RidTable,
        requests: RequestTable,
        store: TensorStore,
        transport: Transport,
        done: list[WalkDone],
        rank: int,
        capacity: int,
    ) -> None:
        self._bus = bus
        self._rids = rids
        self._requests = requests
        self._store = store
        self._transport = transport
        self._done = done
        self._rank = rank
        self._row_of = np.zeros(capacity, np.int64)
        self._cold: list[Message] = []

    def fail(self, rid: str, why: str, code: int, field: str = "") -> None:
        """Report a request that cannot go on; it is sent with the next flush."""
        self._cold.append(Fail(rid=rid, message=why, code=code, field=field))

    def fail_handle(self, handle: int, why: str, code: int = 500) -> None:
        self.fail(self._rids.rid(handle), why, code)

    def opened(self, rid: str) -> None:
        self._cold.append(Opened(rid=rid, rank=self._rank))

    def report(self, steps: StepReport) -> None:
        self._cold.append(steps)

    def count(self, routed: Routed) -> None:
        """Count what a step emits, before a walk that ends with it reports how much there was."""
        for emit in routed.emits:
            self._requests.count_emits(emit.signal, emit.handles)

    def flush(self, step: Step, routed: Routed) -> None:
        """Send everything that this step leads to."""
        to_front: list[Message] = []
        if routed.emits:
            to_front.append(self._emit_frame(step, routed.emits))
        self._to_peers(routed)
        self._to_front(to_front)

    def flush_cold(self, routed: Routed | None = None) -> None:
        """Send what messages, not a step, led to."""
        if routed is not None:
            self._to_peers(routed)
        self._to_front([])

    def rest(self) -> None:
        """Nothing runs: pay peers what they are owed and give unused memory back."""
        self._transport.rest()
        self._to_front([])

    def close(self) -> None:
        """Drop what waits for room and give shared memory back."""
        self._transport.close()

    def _to_peers(self, routed: Routed) -> None:
        self._transport.send(routed)
        if routed.freed:
            self._store.free(routed.freed)
        for failure in self._transport.take_failures():
            self.fail(failure.rid, failure.detail, 500)

    def _to_front(self, messages: list[Message]) -> None:
        if self._done:
            messages.extend(self._done)
            self._done.clear()
        if self._cold:
            messages.extend(self._cold)
            self._cold.clear()
        if messages:
            self._bus.send(peer_name(FRONT_RANK), messages)

    def _emit_frame(self, step: Step, emits: Sequence[EmitColumns]) -> EmitFrame:
        rids: list[str] = []
        signals: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        tensor_rids: list[str] = []
        tensor_signals: list[str] = []
        tensors: list[HostTensor] = []
        for emit in emits:
            names = self._rids.rids(emit.handles)
            if emit.ids[0] == LIVE_COLUMN:
                rows = self._rows_of(step, emit)
                rids.extend(names)
                signals.extend((emit.signal,) * len(names))
                tokens.extend(step.host(emit.signal)[rows].tolist())
                if step.outputs.logprobs is not None:
                    logprobs.extend(step.outputs.logprobs[row] for row in np.arange(step.num_rows)[rows].tolist())
            else:
                tensor_rids.extend(names)
                tensor_signals.extend((emit.signal,) * len(names))
                tensors.extend(host_tensors.from_torch(tensor) for tensor in self._store.gather_list(emit.ids))
                self._store.free(self._store.release(emit.ids))
        if signals and signals.count(signals[0]) == len(signals):
            signals = signals[:1]
        return EmitFrame(
            src=self._rank,
            rids=rids,
            signals=signals,
            tokens=tokens,
            logprobs=logprobs if any(entry is not None for entry in logprobs) else None,
            tensor_rids=tensor_rids,
            tensor_signals=tensor_signals,
            tensors=tensors,
        )

    def _rows_of(self, step: Step, emit: EmitColumns) -> slice | np.ndarray:
        """Where the rows of `emit` are in the step: a whole part, unless some rows of it have left."""
        for part in step.parts:
            if emit.handles == part.taken.rows:
                return slice(part.begin, part.end)
        self._row_of[step.handles] = np.arange(step.num_rows)
        return self._row_of[emit.handles]
