"""The worker's inbox: each message becomes rows, columns or gates.

Runs on the worker's loop thread. A handler's exception fails exactly the request named in its message and never drops
the rest of a drained queue. Ids unknown here are normal: the request may have left while the message travelled.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from mstar.communication import host_tensors
from mstar.communication.messages import (
    AckFrame,
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
from mstar.worker.outbox import Outbox
from mstar.worker.parking import Parking
from mstar.worker.requests import Request, RequestTable
from mstar.worker.rid_table import RidTable, TableFull
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
        graph: GraphRuntime,
        store: TensorStore,
        transport: Transport,
        walks: WalkRunner,
        outbox: Outbox,
    ) -> None:
        self._rids = rids
        self._requests = requests
        self._admission = admission
        self._graph = graph
        self._store = store
        self._transport = transport
        self._walks = walks
        self._outbox = outbox
        self._parking = Parking(graph)
        self._routed = Routed()
        """What messages led to since the last `collect`."""
        self.leaving: list[int] = []
        """Handles to tear down once no step holds them."""
        self.closing = False

    def apply(self, messages: Iterable[ToWorker]) -> None:
        """Apply a drained queue, then let in who fits and send what this led to."""
        for message in messages:
            try:
                self._apply(message)
            except RequestRefused as refused:
                self._fail(message, str(refused), refused.code)
            except Exception:
                log.exception("a %s message could not be applied", type(message).__name__)
                self._fail(message, f"the server could not apply a {type(message).__name__} message", 500)
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
            case PeerUp():
                self._transport.peer_up(message)
            case PeerLost():
                self._transport.peer_lost(message)
            case Hello():
                self._transport.hello(message)
            case Shutdown():
                self.closing = True

    def enter(self) -> None:
        """Let waiting requests in that now fit."""
        for request in self._admission.admitted():
            if request.spans_workers:
                self._outbox.opened(request.rid)
            for start in request.starts:
                self._run(request, start)
            request.starts.clear()
        self.collect()

    def collect(self) -> None:
        """What the graph did outside of a step: walks that had nothing to run here, freed tensors, credits."""
        routed, self._routed = self._routed, Routed()
        self._graph.collect(routed)
        self._walks.follow(routed)
        self._outbox.flush_cold(routed)

    def forget(self, handle: int) -> list[int]:
        """Tensor ids still parked for a request that leaves."""
        return self._parking.forget(handle)

    def _fail(self, message: ToWorker, text: str, code: int) -> None:
        rid = getattr(message, "rid", None)
        if rid is not None:
            self._outbox.fail(rid, text, code)

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
        if request.admitted:
            self._run(request, message)
        else:
            request.starts.append(message)

    def _join(self, rid: str, opening: OpenRequest, *, spans_workers: bool) -> Request:
        prompt_ids = None if opening.prompt_ids is None else host_tensors.to_numpy(opening.prompt_ids)
        request = Request(rid, handle=-1, open=opening, prompt_ids=prompt_ids, spans_workers=spans_workers)
        self._admission.check(request)
        request.handle = self._rids.intern(rid)
        self._requests.put(request)
        self._admission.join(request)
        return request

    def _run(self, request: Request, start: StartWalk) -> None:
        self._walks.start(request, start, self._routed)
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
        if not request.admitted:
            self._admission.withdraw(request)
        elif request.partitions:
            self._graph.gate([handle], Gate.REMOVING, True)
        self.leaving.append(handle)

    def _edges(self, message: EdgeFrame) -> None:
        self._parking.edges(self._transport.read_edges(message))

    def _streams(self, message: StreamFrame) -> None:
        items, ends = self._transport.read_streams(message)
        self._parking.stream_items(items)
        for handle, edge, total in ends:
            self._parking.stream_end(handle, edge, total, started=bool(self._requests[handle].partitions))
