"""The worker's inbox: each message becomes rows, columns or gates.

Runs on the worker's loop thread. A handler's exception fails exactly the request named in its message and never drops
the rest of a drained queue. Ids unknown here are normal: the request may have left while the message travelled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from mstar.communication import host_tensors
from mstar.communication.messages import (
    AckFrame,
    AskSteps,
    EdgeFrame,
    Hello,
    Open,
    OpenRequest,
    PeerLost,
    PeerUp,
    Remove,
    Shutdown,
    StartWalk,
    Stop,
    StreamFrame,
    ToWorker,
    Unpersist,
)
from mstar.communication.tensor_store import TensorStore
from mstar.communication.transport import Transport
from mstar.graph.protocol import Gate, GraphRuntime, Routed
from mstar.worker.admission import Admission, RequestRefused
from mstar.worker.grammars.constrained_rows import ConstrainedRows
from mstar.worker.outbox import Outbox
from mstar.worker.parking import Parking
from mstar.worker.preemption import Preemption
from mstar.worker.requests import Request, RequestTable, Seniority
from mstar.worker.rid_table import RidTable, TableFull
from mstar.worker.step_log import StepLog
from mstar.worker.walks import WalkRunner

log = logging.getLogger(__name__)


class Inbox:
    """Applies messages to the worker's parts, each passed in and owning its state."""

    def __init__(
        self,
        *,
        rids: RidTable,
        requests: RequestTable,
        admission: Admission,
        constrained: ConstrainedRows,
        preemption: Preemption,
        graph: GraphRuntime,
        store: TensorStore,
        transport: Transport,
        walks: WalkRunner,
        outbox: Outbox,
        step_log: StepLog,
    ) -> None:
        self._rids = rids
        self._requests = requests
        self._admission = admission
        self._constrained = constrained
        self._preemption = preemption
        self._graph = graph
        self._store = store
        self._transport = transport
        self._walks = walks
        self._outbox = outbox
        self._step_log = step_log
        self._parking = Parking(graph, rids, store)
        self._arrivals = count()
        self._routed = Routed()
        """What messages led to since the last `collect`."""
        self.leaving: list[int] = []
        """Handles to tear down once no step holds them."""
        self.closing = False

    def apply(self, messages: Iterable[ToWorker]) -> None:
        """Apply a drained queue, then let in who fits and send what this led to."""
        for message in messages:
            with self._failing(_named_in(message), f"apply a {type(message).__name__} message"):
                self._apply(message)
        self.enter()

    def _apply(self, message: ToWorker) -> None:
        match message:
            case EdgeFrame():
                self._edges(message)
            case StreamFrame():
                self._streams(message)
            case AckFrame():
                self._graph.stream_credit(*self._transport.read_acks(message))
            case StartWalk():
                self._start_walk(message)
            case Open():
                self._open(message)
            case Stop():
                self._stop(message)
            case Unpersist():
                self._unpersist(message)
            case Remove():
                self._remove(message)
            case AskSteps():
                self._outbox.report(self._step_log.report(message))
            case PeerUp():
                self._transport.peer_up(message)
            case PeerLost():
                self._transport.peer_lost(message)
            case Hello():
                self._transport.hello(message)
            case Shutdown():
                self.closing = True

    def take_grammars(self) -> None:
        """Grammars have been compiled: who waited for one stands in line now, or fails."""
        for request, refusal in self._constrained.answered():
            with self._failing((request.rid,), "begin the request"):
                if refusal is not None:
                    raise refusal
                self._admission.join(request)
        self.enter()

    def enter(self) -> None:
        """Let waiting requests in that now fit."""
        for request in self._admission.admitted():
            with self._failing((request.rid,), "begin the request"):
                self._begin(request)
        self.collect()

    def collect(self) -> None:
        """What the graph did outside of a step: walks that had nothing to run here, freed tensors, credits."""
        routed, self._routed = self._routed, Routed()
        self._graph.collect(routed)
        self._walks.follow(routed)
        self._outbox.flush_cold(routed)

    @contextmanager
    def _failing(self, rids: Iterable[str], deed: str) -> Iterator[None]:
        """What goes wrong in here fails these requests and nothing else; they stay until the front removes them."""
        why, code, field = "", 500, ""
        try:
            yield
        except RequestRefused as refused:
            why, code, field = str(refused), refused.code, refused.field
        except Exception:
            why = f"the server could not {deed}"
            log.exception("%s", why)
        if why:
            for rid in dict.fromkeys(rids):
                self._outbox.fail(rid, why, code, field)

    def _begin(self, request: Request) -> None:
        """A request has its room: open it and start what it came with."""
        self._admission.open(request)
        if request.spans_workers:
            self._outbox.opened(request.rid)
        for start in request.starts:
            self._run(request, start)
        request.starts.clear()

    def _open(self, message: Open) -> None:
        if self._rids.handle(message.rid) is None:
            self._join(message.rid, message.open, spans_workers=True)

    def _start_walk(self, message: StartWalk) -> None:
        handle = self._rids.handle(message.rid)
        if handle is not None:
            request = self._requests[handle]
        elif message.open is not None:
            request = self._join(message.rid, message.open, spans_workers=False)
        else:
            return
        if request.opened:
            self._run(request, message)
        elif not request.admitted:
            request.starts.append(message)

    def _join(self, rid: str, opening: OpenRequest, *, spans_workers: bool) -> Request:
        prompt_ids = None if opening.prompt_ids is None else host_tensors.to_numpy(opening.prompt_ids)
        request = Request(rid, handle=-1, open=opening, prompt_ids=prompt_ids, spans_workers=spans_workers)
        request.seniority = Seniority(opening.priority, opening.arrival, next(self._arrivals))
        self._admission.check(request)
        self._constrained.check(request)
        try:
            request.handle = self._rids.intern(rid)
        except TableFull as full:
            raise RequestRefused(
                f"this server holds {self._rids.capacity} requests already; try again later", 503
            ) from full
        self._requests.put(request)
        if self._constrained.join(request):
            self._admission.join(request)
        return request

    def _run(self, request: Request, start: StartWalk) -> None:
        self._walks.start(request, start, self._routed)
        self._preemption.waiting.started(request)
        self._parking.deliver(request.handle)

    def _stop(self, message: Stop) -> None:
        handle = self._rids.handle(message.rid)
        if handle is not None:
            self._walks.stop(self._requests[handle], message.partition)

    def _unpersist(self, message: Unpersist) -> None:
        handle = self._rids.handle(message.rid)
        if handle is not None:
            self._store.free(self._graph.unpersist(handle, message.partition, message.name))

    def _remove(self, message: Remove) -> None:
        handle = self._rids.handle(message.rid)
        if handle is not None and not self._requests.removing[handle]:
            self.remove(handle)

    def remove(self, handle: int) -> None:
        """First step of the one teardown path: gate the row, so that no new step takes it."""
        request = self._requests[handle]
        self._requests.removing[handle] = True
        if not request.joined:
            self._constrained.withdraw(request)
        elif not request.admitted:
            self._admission.withdraw(request)
        elif self._graph.knows(handle):
            self._graph.gate([handle], Gate.REMOVING, True)
        self.leaving.append(handle)

    def _edges(self, message: EdgeFrame) -> None:
        self._parking.edges(self._transport.read_edges(message))

    def _streams(self, message: StreamFrame) -> None:
        items, ends = self._transport.read_streams(message)
        self._parking.stream_items(items)
        for handle, edge, total in ends:
            self._parking.stream_end(handle, edge, total, started=self._graph.knows(handle))


def _named_in(message: ToWorker) -> Sequence[str]:
    """Ids of the requests that a message is about."""
    match message:
        case EdgeFrame(rids=rids):
            return rids
        case StreamFrame(rids=rids, end_rids=ending):
            return [*rids, *ending]
        case AckFrame(credit_rids=rids):
            return rids
        case Open(rid=rid) | StartWalk(rid=rid) | Stop(rid=rid) | Unpersist(rid=rid) | Remove(rid=rid):
            return (rid,)
        case _:
            return ()
