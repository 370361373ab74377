"""`Waiting`: requests that were let in and may not run now, most senior first, and what each waits for.

Runs on the worker's loop thread. Their rows have the gate HELD; who is put in here and who is let go is `Preemption`'s.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from mstar.graph.protocol import Gate, GraphRuntime
from mstar.worker.requests import Request, Seniority
from mstar.worker.rid_table import HandleMap, RidTable


@dataclass(slots=True)
class Wait:
    """Why a request waits. `needs`: pages of `resource` that must be there before its next try (0: nobody knows how
    many; it tries again when more than `num_left` have left, or when the step has ended that was in flight, `busy`, at
    its refusal and nothing else runs). `taken`: pages by resource that it lost. `marked`: resources whose pages it will
    lose as soon as no step has its row. With nothing of all that it waits for its turn."""

    resource: str = ""
    needs: int = 0
    num_left: int = 0
    busy: bool = False
    taken: dict[str, int] = field(default_factory=dict)
    marked: list[str] = field(default_factory=list)

    @property
    def wanted(self) -> dict[str, int]:
        """Pages by resource that must be available before it goes on, as far as that is known."""
        if not self.needs:
            return dict(self.taken)
        return {**self.taken, self.resource: self.taken.get(self.resource, 0) + self.needs}


class Waiting:
    """See the module docstring. Iteration goes over those that wait as it begins."""

    def __init__(self, graph: GraphRuntime, rids: RidTable) -> None:
        self._graph = graph
        self._requests: list[Request] = []
        self._waits: HandleMap[Wait] = rids.handle_map("requests that wait for room")

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def __contains__(self, request: Request) -> bool:
        return request.handle in self._waits

    def __getitem__(self, request: Request) -> Wait:
        return self._waits[request.handle]

    @property
    def num_preempted(self) -> int:
        return sum(bool(wait.taken) for wait in self._waits.values())

    def has_work(self, request: Request) -> bool:
        """Something of it would run if it were let go."""
        return self._graph.ready_behind(request.handle, Gate.HELD)

    def stop(self, request: Request) -> Wait:
        """Its rows are taken for no further step."""
        wait = self._waits.get(request.handle)
        if wait is None:
            wait = self._waits[request.handle] = Wait()
            insort(self._requests, request, key=seniority)
            self._gate(request, on=True)
        return wait

    def started(self, request: Request) -> None:
        """The graph runtime has learned of a request, which may wait already."""
        if request in self:
            self._gate(request, on=True)

    def let_go(self, request: Request) -> None:
        self.forget(request)
        self._gate(request, on=False)

    def forget(self, request: Request) -> None:
        """It leaves, or has failed."""
        if self._waits.pop(request.handle) is not None:
            del self._requests[bisect_left(self._requests, request.seniority, key=seniority)]

    def _gate(self, request: Request, *, on: bool) -> None:
        if self._graph.knows(request.handle):
            self._graph.gate([request.handle], Gate.HELD, on)


def seniority(request: Request) -> Seniority:
    return request.seniority
