"""The conductor: takes what workers and the supervisor say, keeps the ledger, and tells workers what to do next.

Front loop only; never blocks. `on_messages` handles one pass over the inbox: it pushes events to the requests' streams,
wakes each stream once, and sends each worker one message. A handler's exception fails the requests that its message
names, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from mstar.communication.address import peer_name
from mstar.communication.bus import Bus
from mstar.communication.messages import (
    EmitFrame,
    Fail,
    Heartbeat,
    Hello,
    Message,
    Open,
    Opened,
    OpenRequest,
    PeerLost,
    PeerUp,
    Ready,
    Remove,
    Shutdown,
    StepReport,
    Stop,
    ToFront,
    WalkDone,
)
from mstar.conductor.events import Event, Failure, FinishedEvent, RequestStream, TensorEvent, TokenEvent
from mstar.conductor.request_table import RequestRecord, RequestTable
from mstar.conductor.statistics import Statistics
from mstar.conductor.step_reports import StepReports
from mstar.conductor.walks import WalkDirectory
from mstar.conductor.worker_watch import WorkerWatch
from mstar.conductor.workers import WorkerTable

logger = logging.getLogger(__name__)
RETRY_LOST_WORKER_S = 2


class Conductor:
    """`on_ready` is called each time that the last missing worker becomes ready, `on_shutdown` when the supervisor asks
    for a drain. `clock`: monotonic seconds."""

    def __init__(
        self,
        *,
        bus: Bus[ToFront],
        walks: WalkDirectory,
        workers: WorkerTable,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
        on_ready: Callable[[], None] = lambda: None,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self.requests = RequestTable()
        self.statistics = Statistics()
        self.num_waiting = 0
        """Choices taken on that have emitted nothing yet."""
        self.now = clock
        self.step_reports = StepReports(bus)
        self._bus = bus
        self._walks = walks
        self._on_shutdown = on_shutdown
        self._watch = WorkerWatch(
            table=workers,
            bus=bus,
            loop=loop,
            clock=clock,
            fail_rank=self._fail_rank,
            after_alarm=self.flush,
            on_ready=on_ready,
        )
        self._pass_at = 0.0
        self._outgoing: dict[int, list[Message]] = {}
        self._dirty: list[RequestStream] = []
        self._handlers: dict[type, Callable[..., None]] = {
            EmitFrame: self._on_emit,
            WalkDone: self._on_walk_done,
            Opened: self._on_opened,
            Fail: self._on_fail,
            StepReport: self.step_reports.arrived,
            Heartbeat: self._watch.heartbeat,
            Hello: self._watch.hello,
            Ready: self._watch.ready,
            PeerUp: self._watch.peer_up,
            PeerLost: self._watch.peer_lost,
            Shutdown: self._on_supervisor_shutdown,
        }

    def on_messages(self, messages: Sequence[ToFront]) -> None:
        """One pass over the inbox."""
        self._pass_at = self.now()
        for message in messages:
            try:
                self._handlers[type(message)](message)
            except Exception:
                logger.exception("handling %s failed", type(message).__name__)
                self._fail_named(message)
        self.flush()

    def flush(self) -> None:
        """Sends what this pass has to say and wakes the streams that it touched."""
        while self._outgoing or self._dirty:
            outgoing, self._outgoing = self._outgoing, {}
            dirty, self._dirty = self._dirty, []
            for rank, messages in outgoing.items():
                self._bus.send(peer_name(rank), messages)
            for stream in dirty:
                try:
                    stream.wake()
                except Exception:
                    logger.exception("writing the output of a request failed")
                    self.fail(stream, Failure(500, "internal_error", "The server failed to write the output."))

    def start(self, record: RequestRecord, opening: OpenRequest) -> None:
        """Puts a choice on its workers. Call `flush` after the last choice of a request."""
        opening = msgspec.structs.replace(opening, ranks=record.ranks)
        self.requests.add(record)
        record.times.started_at = self.now()
        record.stream.times.choices.append(record.times)
        record.stream.rids[record.choice] = record.rid
        if len(record.ranks) > 1:
            record.opening = opening
            self._send(record.ranks[0], Open(rid=record.rid, open=opening))
        else:
            self._send_all(self._walks.start(record, opening))

    def stop(self, stream: RequestStream, choice: int) -> None:
        """The text of a choice is complete: ends its text partition; further text tokens are dropped. `FinishedEvent`
        comes with reason stop."""
        record = self.requests.get(stream.rids[choice])
        if record is None or record.is_stopped:
            return
        record.is_stopped = True
        text = record.partitions.get(self._walks.text_partition)
        for rank in () if text is None else text.ranks:
            self._send(rank, Stop(record.rid, self._walks.text_partition))
        self.flush()

    def fail(self, stream: RequestStream, failure: Failure) -> None:
        """Ends a whole request with a failure, wherever it stands; a second call changes nothing."""
        if not stream.num_open:
            return
        self.statistics.outcomes[failure.code] += stream.num_open
        stream.times.failure = failure.code
        for choice, rid in enumerate(stream.rids):
            self._started_emitting(stream, choice)
            record = self.requests.pop(rid)
            if record is not None:
                record.times.end(self.now(), failure.code, record.num_received)
                self._remove(record)
        stream.close(stream.num_open)
        self._push(stream, failure)

    def close(self) -> None:
        self._watch.close()

    def _on_emit(self, frame: EmitFrame) -> None:
        """The one hot handler: once per step, a few operations per token."""
        src, now, requests, statistics = frame.src, self._pass_at, self.requests.by_rid, self.statistics
        signals, tokens, logprobs = frame.signals, frame.tokens, frame.logprobs
        signal = signals[0] if signals else ""
        key, is_mixed = (src, signal), len(signals) > 1
        for i, rid in enumerate(frame.rids):
            record = requests.get(rid)
            if record is None:
                continue
            if is_mixed:
                signal = signals[i]
                key = (src, signal)
            received = record.received
            received[key] = received.get(key, 0) + 1
            if not record.is_stopped or self._walks.modality_of.get(signal) != "text":
                self._push(
                    record.stream, TokenEvent(record.choice, signal, tokens[i], logprobs[i] if logprobs else None)
                )
                statistics.num_generated_tokens += 1
                if record.last_emit_at is None:
                    self._first_emit(record)
                else:
                    statistics.inter_token_s.observe(now - record.last_emit_at)
                record.last_emit_at = now
            if record.is_walked:
                self._finish_if_complete(record)
        for rid, signal, tensor in zip(frame.tensor_rids, frame.tensor_signals, frame.tensors, strict=True):
            record = requests.get(rid)
            if record is None:
                continue
            record.received[src, signal] = record.received.get((src, signal), 0) + 1
            self._push(record.stream, TensorEvent(record.choice, signal, tensor))
            if record.last_emit_at is None:
                self._first_emit(record)
            record.last_emit_at = now
            if record.is_walked:
                self._finish_if_complete(record)

    def _first_emit(self, record: RequestRecord) -> None:
        record.times.first_at = self._pass_at
        self.statistics.first_token_s.observe(self._pass_at - record.stream.times.submitted_at)
        self._started_emitting(record.stream, record.choice)

    def _started_emitting(self, stream: RequestStream, choice: int) -> None:
        if stream.waiting[choice]:
            stream.waiting[choice] = False
            self.num_waiting -= 1

    def _on_walk_done(self, message: WalkDone) -> None:
        record = self.requests.get(message.rid)
        if record is None:
            return
        progress = record.partitions.get(message.partition)
        if progress is None or message.rank not in progress.waiting:
            logger.warning("rank %d reports a walk that was not started there", message.rank)
            return
        if message.reason == "error":
            self.fail(
                record.stream, Failure(500, "worker_error", f"Worker {message.rank} failed in {message.partition}.")
            )
            return
        progress.waiting.discard(message.rank)
        for signal, count in message.emits.items():  # totals of the request, so a later report has the larger ones
            key = (message.rank, signal)
            record.expected[key] = max(count, record.expected.get(key, 0))
        if message.partition == self._walks.text_partition:
            record.num_computed_tokens = max(record.num_computed_tokens, message.num_computed_prompt_tokens)
        if message.reason == "stop":  # a worker without the stopping node reports the end of its walks only
            progress.reason = "stop"
        if progress.waiting:
            return
        self._send_all(self._walks.advance(record, message.partition))
        if progress.is_done and all(other.is_done for other in record.partitions.values()):
            record.is_walked = True
            self._finish_if_complete(record)

    def _finish_if_complete(self, record: RequestRecord) -> None:
        if not record.has_all_emits():
            return
        text = record.partitions.get(self._walks.text_partition)
        reason = "stop" if record.is_stopped or text is None else text.reason
        stream = record.stream
        record.times.end(self._pass_at, reason, record.num_received)
        stream.close(1)
        self.requests.pop(record.rid)
        self._remove(record)
        self._started_emitting(stream, record.choice)
        self.statistics.outcomes[reason] += 1
        if not stream.num_open:
            self.statistics.request_s.observe(self._pass_at - stream.times.submitted_at)
        self._push(stream, FinishedEvent(record.choice, reason, record.num_prompt_tokens, record.num_cached_tokens))

    def _on_opened(self, message: Opened) -> None:
        record = self.requests.get(message.rid)
        if record is None or record.opening is None or record.ranks[record.num_opened] != message.rank:
            return
        record.num_opened += 1
        if record.num_opened < len(record.ranks):
            self._send(record.ranks[record.num_opened], Open(rid=record.rid, open=record.opening))
            return
        record.opening = None
        self._send_all(self._walks.start(record, None))

    def _on_fail(self, message: Fail) -> None:
        record = self.requests.get(message.rid)
        if record is not None:
            code = "request_failed" if message.code >= 500 else "request_refused"
            self.fail(record.stream, Failure(message.code, code, message.message, message.field or None))

    def _on_supervisor_shutdown(self, message: Shutdown) -> None:
        self._on_shutdown()

    def _fail_rank(self, rank: int, reason: str) -> None:
        for record in self.requests.on_rank(rank):
            self.fail(record.stream, Failure(503, "worker_lost", reason, retry_after_s=RETRY_LOST_WORKER_S))

    def _fail_named(self, message: ToFront) -> None:
        rids: Iterable[str] = [getattr(message, "rid", "")]
        if isinstance(message, EmitFrame):
            rids = [*message.rids, *message.tensor_rids]
        for rid in rids:
            record = self.requests.get(rid)
            if record is not None:
                self.fail(record.stream, Failure(500, "internal_error", "The server failed to handle the output."))

    def _remove(self, record: RequestRecord) -> None:
        told = record.ranks if record.opening is None else record.ranks[: record.num_opened + 1]
        for rank in told:
            self._send(rank, Remove(record.rid))

    def _push(self, stream: RequestStream, event: Event) -> None:
        stream.push(event)
        if not stream.is_dirty:
            stream.is_dirty = True
            self._dirty.append(stream)

    def _send(self, rank: int, message: Message) -> None:
        self._outgoing.setdefault(rank, []).append(message)

    def _send_all(self, messages: Iterable[tuple[int, Message]]) -> None:
        for rank, message in messages:
            self._send(rank, message)
