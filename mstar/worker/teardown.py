"""Teardown: the one path on which a request leaves, for finish, abort, disconnect, failure and timeout.

Runs on the worker's loop thread. A row is gated first (`Inbox.remove`); here it goes once no step holds it, enqueued or
armed; its handle is released last.
"""

from __future__ import annotations

import numpy as np

from mstar.communication.tensor_store import TensorStore
from mstar.graph.protocol import GraphRuntime
from mstar.worker.admission import Admission
from mstar.worker.inbox import Inbox
from mstar.worker.requests import RequestTable
from mstar.worker.rid_table import RidTable


class Teardown:
    """Counts which steps hold which rows, and frees what leaves."""

    def __init__(
        self,
        *,
        rids: RidTable,
        requests: RequestTable,
        admission: Admission,
        graph: GraphRuntime,
        store: TensorStore,
        inbox: Inbox,
    ) -> None:
        self._rids = rids
        self._requests = requests
        self._admission = admission
        self._graph = graph
        self._store = store
        self._inbox = inbox

    def hold(self, handles: np.ndarray) -> None:
        """A step holds these rows (each once)."""
        self._requests.in_steps[handles] += 1

    def step_ended(self, handles: np.ndarray) -> None:
        """A step that held them has ended or was abandoned."""
        self._requests.in_steps[handles] -= 1

    def removing(self, handles: np.ndarray) -> set[int]:
        """Those of `handles` that are leaving."""
        if not self._inbox.leaving:
            return set()
        return set(handles[self._requests.removing[handles]].tolist())

    def run(self) -> bool:
        """Free every leaving row that no step holds. True: room has become free."""
        leaving = self._inbox.leaving
        if not leaving:
            return False
        stay = [handle for handle in leaving if self._requests.in_steps[handle]]
        if len(stay) == len(leaving):
            return False
        for handle in leaving:
            if not self._requests.in_steps[handle]:
                self._free(handle)
        self._inbox.leaving[:] = stay
        return True

    def _free(self, handle: int) -> None:
        if self._graph.knows(handle):
            self._store.free(self._graph.remove(handle))
        request = self._requests[handle]
        if request.admitted:
            self._admission.leave(request)
        self._rids.release(handle)
