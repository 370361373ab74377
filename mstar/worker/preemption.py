"""Preemption: who gives way when memory is short, and who comes back first.

Runs on the worker's loop thread, on host integers; it builds no step. Requests are ordered by seniority: priority, then
arrival. One that waits was refused and keeps what it has (*held*), or its pages were taken (*preempted*).

Nothing gets stuck, and nothing runs in circles:

1. Whoever is refused may have the room of its juniors, youngest first, and only theirs. So a request loses pages only
   to a senior one, and who is taken from is never who takes.
2. A round of refusals ends: each one preempts, marks or holds a row, and such rows leave the step. So either a step is
   submitted or all are gated, and then the loop blocks; the next try comes with an event (a step's end, a message).
3. While somebody waits who could run, only a more important request is let in, and a victim comes back only where a
   page is left for each running row. A step takes no more than that beyond what was promised, so who was let go
   because there are so many pages gets them, and who has come back is not the next victim.
4. The most senior request that can run does: what juniors have is its own, and with nobody else it fits
   (`Admission.check`). Requests are finite, so each becomes the most senior one.
5. A request over several workers is opened on them in rank order and runs when all have let it in. Until then it has
   computed nothing, and gives way to anybody (`unused`). All workers order alike, so of those that run the most senior
   one has its way everywhere. When nothing runs on a worker, margins do not count (`unblock`), and who waits for
   other workers gives way after `PATIENCE_S`, to juniors too: that ends circles which no worker can see alone.
6. Who cannot be preempted once it computes was promised all that it will ever need, so it is never refused. In one
   cache, requests over several workers either all can be preempted or none can: the room that a host has for some
   makes no difference between them (`CacheHoldings.reserve`). One kind of circle is left, where none can: two requests
   lose their room on a worker each between their opening there and their start (5), begin without it, and each then
   waits for what the other holds, computed or promised. There, a deadline is what ends them.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from mstar.engine.execution import AdmitOutcome
from mstar.engine.request_memory import RequestMemory
from mstar.graph.protocol import GraphRuntime
from mstar.worker.requests import Request, RequestTable
from mstar.worker.rid_table import RidTable
from mstar.worker.victims import Victims
from mstar.worker.waiting import Wait, Waiting, seniority

PATIENCE_S = 0.1
"""How long a worker with nothing to run leaves their pages to requests that wait for other workers: longer than a step
of most, so that a short wait does not cost a cache."""


class Preemption:
    """The requests inside, and which of them wait. See the module docstring."""

    def __init__(
        self,
        *,
        memory: RequestMemory,
        graph: GraphRuntime,
        requests: RequestTable,
        rids: RidTable,
        max_rows: int,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._memory = memory
        self._requests = requests
        self._max_rows = max_rows
        self._patience_s = patience_s
        self._inside: list[Request] = []  # most senior first
        self._num_left = 0
        self._idle_since: float | None = None
        self._last_first: Request | None = None
        self.waiting = Waiting(graph, rids)
        self._victims = Victims(memory, requests, self.waiting)

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    @property
    def patience_s(self) -> float | None:
        """How long the loop may sleep at most; None: until a message comes."""
        return None if self._idle_since in (None, math.inf) else self._patience_s

    def enter(self, request: Request) -> None:
        """It has been let in. With `max_rows` running, the least important one waits until there is a turn for it."""
        if self._num_running >= self._max_rows and (other := self._least_important(request)) is not None:
            self.waiting.stop(other)
        insort(self._inside, request, key=seniority)

    def leave(self, request: Request) -> None:
        """Its room is free again."""
        del self._inside[bisect_left(self._inside, request.seniority, key=seniority)]
        if request in self.waiting:
            self.waiting.forget(request)
        self._num_left += 1
        self._idle_since = None

    # a step's rows ran short

    def refused(self, outcome: AdmitOutcome, *, busy: bool) -> None:
        """Make room for the most senior of the refused rows, or hold some, so that the step can be composed again with
        what is left. `busy`: a step is in flight."""
        lacking = sorted((self._requests[handle] for handle in outcome.refused), key=seniority)
        missing = outcome.missing
        if missing > 0:
            victims = self._giving_way_to(lacking[0])
            missing -= self._victims.take(outcome.resource, missing, victims, outcome.refused).now
            lacking = [request for request in lacking if request not in self.waiting]
            if missing <= 0 or not lacking:
                return
        # Each lacks a page at least: without so many of them the others have enough, or are refused once more.
        num_held = max(1, min(missing, len(lacking) - 1))
        needs = min(outcome.missing, 1)
        if len(outcome.refused) == 1 and needs:  # of more, nobody knows what one of them lacks
            needs = self._memory.available(outcome.resource) + missing
        for request in lacking[-num_held:]:
            wait = self.waiting.stop(request)
            wait.resource, wait.needs = outcome.resource, needs
            wait.num_left, wait.busy = self._num_left, busy

    # a request asks to be let in

    def outranked(self, request: Request) -> bool:
        """Somebody inside who is as important could run and waits: whoever comes in now would compete for its room."""
        return any(
            other.seniority.priority <= request.seniority.priority and self.waiting.has_work(other)
            for other in self.waiting
        )

    def has_turn(self, request: Request) -> bool:
        """One more may run, or a less important one can wait instead."""
        return self._num_running < self._max_rows or self._least_important(request) is not None

    def make_way(self, request: Request) -> bool:
        """Take room from requests that are less important than one which asks to be let in. False: there is not enough,
        or it is there when the victims' step has ended."""
        victims = [one for one in reversed(self._inside) if one.seniority.priority > request.seniority.priority]
        return self._victims.make_room(request, victims)

    # who waits

    def take_marked(self) -> bool:
        """Preempt the victims whose step has ended. True: there were some."""
        return self._victims.take_marked()

    def readmit(self, first_in_line: Request | None) -> bool:
        """Let those go on for whom there is room now, senior first; who is more important than they comes in first.
        Those with nothing to run wait behind the others. True: nobody waits any more."""
        pledged: dict[str, int] = {}
        ahead = None if first_in_line is None else first_in_line.seniority.priority
        idle: list[Request] = []
        for request in self.waiting:
            if ahead is not None and ahead < request.seniority.priority:
                return False
            if not self.waiting.has_work(request):
                idle.append(request)
            elif not (self._try(request, pledged) or (self._take_back(request) and self._try(request, pledged))):
                return False
        for request in idle:
            if not self._requests.removing[request.handle] and not self._try(request, pledged):
                return False
        return not self.waiting

    def unblock(self, first_in_line: Request | None, *, idle: bool) -> dict[int, str] | None:
        """With nothing to compose and no step in flight (`idle`), let one go on at the expense of its juniors, whatever
        the margin. None: nobody did; all wait for something else than room here. Otherwise requests for whom there
        will never be room, with the reason."""
        if not idle:
            self._idle_since = None
            return None
        ready = [request for request in self.waiting if self.waiting.has_work(request)]
        for request in ready:
            if self._force(request, self._giving_way_to(request)):
                self._idle_since = None
                return {}
        if ready and all(self._is_stuck(request) for request in self._inside):
            request = next((one for one in ready if self.waiting[one].resource), ready[0])
            wait = self.waiting[request]
            self.waiting.forget(request)
            resource = wait.resource or next(iter(wait.taken), "memory")
            return {request.handle: f"{resource} has no room left for the request, and no other will leave any"}
        if first_in_line is not self._last_first:
            self._last_first, self._idle_since = first_in_line, None
        if not ready and first_in_line is None:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since >= self._patience_s:
            self._idle_since = math.inf  # a second try would find the same
            if any(self._take_over(request) for request in ready):
                return {}
            if first_in_line is not None and self._let_in(first_in_line):
                return {}
        return None

    # parts of the above

    @property
    def _num_running(self) -> int:
        return len(self._inside) - len(self.waiting)

    def _giving_way_to(self, senior: Request) -> list[Request]:
        """Whose room it may have, in order: requests that other workers have not let in yet, then its juniors."""
        unstarted = [one for one in reversed(self._inside) if one.unstarted and one is not senior]
        return unstarted + [
            one for one in reversed(self._inside) if one.seniority > senior.seniority and not one.unstarted
        ]

    def _least_important(self, than: Request) -> Request | None:
        """The youngest running request of those less important than `than`."""
        for request in reversed(self._inside):
            if request.seniority.priority <= than.seniority.priority:
                break
            if request not in self.waiting:
                return request
        return None

    def _try(self, request: Request, pledged: dict[str, int]) -> bool:
        """Let it go on if there is room beside a page for each running row; `pledged`: pages that others were let go
        for, and that they take with their next step."""
        wait = self.waiting[request]
        if wait.marked or self._num_running >= self._max_rows:
            return False
        if wait.resource and not wait.needs and wait.num_left == self._num_left:
            return False
        for resource, pages in self._with_margin(wait).items():
            if self._memory.available(resource) - pledged.get(resource, 0) < pages:
                return False
        if wait.taken and not self._memory.resume(request.handle):
            return False
        if wait.needs:
            pledged[wait.resource] = pledged.get(wait.resource, 0) + wait.needs
        self.waiting.let_go(request)
        return True

    def _with_margin(self, wait: Wait) -> Mapping[str, int]:
        """Pages that it wants; where it lost some, with one for each running row and itself."""
        running = self._num_running
        if not running:
            return wait.wanted
        spare = {resource: running + 1 for resource in wait.taken if self._memory.grows(resource)}
        return {resource: pages + spare.get(resource, 0) for resource, pages in wait.wanted.items()}

    def _take_back(self, request: Request) -> bool:
        """It lost its pages while it had nothing to run here, and juniors have come in since. True: they are its own
        again."""
        wait = self.waiting[request]
        if not wait.taken or wait.marked:
            return False
        short = self._short(self._with_margin(wait))
        return any(pages > 0 for pages in short.values()) and self._victims.take_all(
            short, self._giving_way_to(request)
        )

    def _force(self, request: Request, victims: Sequence[Request]) -> bool:
        """Let it go on with what there is and what `victims`, which are in no step, can give."""
        wait = self.waiting[request]
        if wait.resource and not wait.needs and wait.num_left == self._num_left and not wait.busy:
            return False
        if not self._victims.take_all(self._short(wait.wanted), victims):
            return False
        while wait.taken and not self._memory.resume(request.handle):
            # what it shared with others when it was preempted has gone meanwhile
            if not any(self._victims.take(resource, 1, victims).now for resource in list(wait.taken)):
                return False
        self.waiting.let_go(request)
        return True

    def _take_over(self, request: Request) -> bool:
        """Nobody has run here for a while: the pages of seniors that wait for other workers are of use to `request`."""
        seniors = [one for one in reversed(self._inside) if one.seniority < request.seniority]
        return self._force(request, [*self._giving_way_to(request), *seniors])

    def _let_in(self, request: Request) -> bool:
        """Nobody has run here for a while: who waits for other workers gives room and its turn to one in line."""
        idle = [one for one in reversed(self._inside) if one not in self.waiting]
        if not self._victims.make_room(request, idle):
            return False
        if self._num_running >= self._max_rows:
            self.waiting.stop(next(one for one in idle if one not in self.waiting))
        return True

    def _short(self, wanted: Mapping[str, int]) -> dict[str, int]:
        return {resource: pages - self._memory.available(resource) for resource, pages in wanted.items()}

    def _is_stuck(self, request: Request) -> bool:
        """It waits for room here, or has given all that it had; it did not only lose its turn."""
        return request in self.waiting and (bool(self.waiting[request].taken) or self.waiting.has_work(request))
