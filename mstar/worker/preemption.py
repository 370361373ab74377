"""Preemption: who gives way when memory is short, and who comes back first.

Runs on the worker's loop thread, on host integers. It moves no page itself (`RequestMemory` does) and builds no step.
Requests are ordered by seniority: priority, then arrival. One that waits has the gate HELD: it was refused and keeps
what it has (*held*), or its pages were taken (*preempted*); a victim in flight is held until no step has its row.

Nothing gets stuck, and nothing runs in circles:

1. Whoever is refused may have the room of its juniors, youngest first, and only theirs. So a request loses pages only
   to a senior one, and who is taken from is never who takes.
2. A round of refusals ends: each one preempts, marks or holds a row, and such rows leave the step. So either a step is
   submitted or all are gated, and then the loop blocks; it has the next try with an event (a step's end, a message).
3. While somebody waits, only a more important request is let in, and a victim comes back only where a page is left for
   each running row. A step takes no more than that beyond what was promised, so who was let go because there are so
   many pages gets them, and who has come back is not the next victim.
4. The most senior request that can run does: all pages that were promised to it or taken for it are its own, and with
   nobody else it fits (`Admission.check`). Requests are finite, so each becomes the most senior one.
5. When nothing runs here, margins do not count (`unblock`), and a senior that waits for other workers gives way for a
   while (`take_over`); a request that other workers have not let in yet runs nothing, and gives way at once. All
   workers order alike, so those that started and are the most senior advance on every worker: none waits for a
   worker that waits for it.
6. Who cannot be preempted (`reclaimable` is 0) has been promised all it will ever need, so it is never refused either.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mstar.engine.execution import AdmitOutcome
from mstar.engine.request_memory import RequestMemory
from mstar.graph.protocol import Gate, GraphRuntime
from mstar.worker.requests import Request, RequestTable
from mstar.worker.rid_table import HandleMap, RidTable

PATIENCE_S = 0.1
"""How long a worker with nothing to run leaves their pages to requests that wait for other workers: longer than a step
of most, so that a short wait does not cost a cache."""


@dataclass(slots=True)
class Wait:
    """Why a request waits. `needs`: pages of `resource` that must be there before its next try (0: nobody knows how
    many; it tries again when more than `num_left` have left, or when the step has ended that was in flight, `busy`, at
    its refusal and nothing else runs). `taken`: pages by resource that it lost. `marked`: resources whose pages it will
    lose as soon as no step has its row."""

    resource: str = ""
    needs: int = 0
    num_left: int = 0
    busy: bool = False
    taken: dict[str, int] = field(default_factory=dict)
    marked: list[str] = field(default_factory=list)


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
        self._graph = graph
        self._requests = requests
        self._max_rows = max_rows
        self._patience_s = patience_s
        self._inside: list[Request] = []  # most senior first, as is `_waiting`
        self._waiting: list[Request] = []
        self._waits: HandleMap[Wait] = rids.handle_map("requests that wait for room")
        self._num_left = 0
        self._idle_since: float | None = None
        self._last_first: Request | None = None

    # who is inside

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        return sum(bool(wait.taken) for wait in self._waits.values())

    def enter(self, request: Request) -> None:
        """It has been let in. With `max_rows` running, the least important one waits until there is a turn for it."""
        if self._num_running >= self._max_rows and (other := self._least_important(request)) is not None:
            self._stop(other)
        insort(self._inside, request, key=_seniority)

    def leave(self, request: Request) -> None:
        """Its room is free again."""
        del self._inside[bisect_left(self._inside, request.seniority, key=_seniority)]
        if request.handle in self._waits:
            self._forget(request)
        self._num_left += 1
        self._idle_since = None

    def started(self, handle: int) -> None:
        """The graph runtime has learned of a request, which may have lost its room before."""
        if handle in self._waits:
            self._graph.gate([handle], Gate.HELD, True)

    # a step's rows ran short

    def refused(self, outcome: AdmitOutcome, *, busy: bool) -> None:
        """Make room for the most senior of the refused rows, or hold some, so that the step can be composed again with
        what is left. `busy`: a step is in flight."""
        lacking = sorted((self._requests[handle] for handle in outcome.refused), key=_seniority)
        missing = outcome.missing
        if missing > 0:
            victims = self._giving_way_to(lacking[0])
            now, _ = self._take(outcome.resource, missing, victims, set(outcome.refused))
            missing -= now
            lacking = [request for request in lacking if request.handle not in self._waits]
            if missing <= 0 or not lacking:
                return
        # Each lacks a page at least: without so many of them the others have enough, or are refused once more.
        held = lacking[-max(1, min(missing, len(lacking) - 1)) :] if len(lacking) > 1 else lacking
        needs = 0 if outcome.missing == 0 else 1
        if len(lacking) == 1 and needs:
            needs = self._memory.available(outcome.resource) + missing
        for request in held:
            wait = self._stop(request)
            wait.resource, wait.needs = outcome.resource, needs
            wait.num_left, wait.busy = self._num_left, busy

    # a request asks to be let in

    def outranked(self, request: Request) -> bool:
        """Somebody inside who is as important could run and waits: whoever comes in now would compete for its room."""
        return any(other.seniority[0] <= request.seniority[0] and self._has_work(other) for other in self._waiting)

    def has_turn(self, request: Request) -> bool:
        """One more may run, or a less important one can wait instead."""
        return self._num_running < self._max_rows or self._least_important(request) is not None

    def make_way(self, request: Request) -> bool:
        """Take room from requests that are less important than one which asks to be let in. False: there is not enough,
        or it is there when the victims' step has ended."""
        victims = [one for one in reversed(self._inside) if one.seniority[0] > request.seniority[0]]
        return self._make_room(request, victims)

    # who waits

    def take_marked(self) -> bool:
        """Preempt the victims whose step has ended. True: there were some."""
        taken = False
        for request in self._waiting:
            marked = self._waits[request.handle].marked
            if marked and not self._in_flight(request):
                for resource in marked:
                    if pages := self._reclaimable(request, resource):
                        self._preempt(request, resource, pages)
                marked.clear()
                taken = True
        return taken

    def readmit(self, first_in_line: Request | None) -> bool:
        """Let those go on for whom there is room now, senior first; who is more important than they comes in first.
        Those with nothing to run wait behind the others. True: nobody waits any more."""
        pledged: dict[str, int] = {}
        ahead = None if first_in_line is None else first_in_line.seniority[0]
        idle: list[Request] = []
        for request in list(self._waiting):
            if ahead is not None and ahead < request.seniority[0]:
                return False
            if not self._has_work(request):
                idle.append(request)
            elif not (self._try(request, pledged) or (self._take_back(request) and self._try(request, pledged))):
                return False
        for request in idle:
            if not self._requests.removing[request.handle] and not self._try(request, pledged):
                return False
        return not self._waiting

    def unblock(self, first_in_line: Request | None, *, idle: bool) -> dict[int, str] | None:
        """With nothing to compose and no step in flight (`idle`), let one go on at the expense of its juniors, whatever
        the margin. None: nobody did; all wait for something else than room here. Otherwise requests for whom there
        will never be room, with the reason."""
        if not idle:
            self._idle_since = None
            return None
        ready = [request for request in self._waiting if self._has_work(request)]
        for request in ready:
            if self._force(request, self._giving_way_to(request)):
                self._idle_since = None
                return {}
        if ready and all(self._is_stuck(request) for request in self._inside):
            request = next((one for one in ready if self._waits[one.handle].resource), ready[0])
            resource = self._waits[request.handle].resource or next(iter(self._waits[request.handle].taken), "memory")
            self._forget(request)
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

    @property
    def patience_s(self) -> float | None:
        """How long the loop may sleep at most; None: until a message comes."""
        return None if self._idle_since in (None, math.inf) else self._patience_s

    # parts of the above

    @property
    def _num_running(self) -> int:
        return len(self._inside) - len(self._waiting)

    def _giving_way_to(self, senior: Request) -> list[Request]:
        """Whose room it may have, in order: requests that other workers have not let in yet, then its juniors."""
        unstarted = [one for one in reversed(self._inside) if one.unstarted and one is not senior]
        return unstarted + [
            one for one in reversed(self._inside) if one.seniority > senior.seniority and not one.unstarted
        ]

    def _take_back(self, request: Request) -> bool:
        """It lost its pages while it had nothing to run here, and juniors have come in since. True: they are its own
        again."""
        wanted = self._with_margin(self._waits[request.handle])
        short = {resource: pages - self._memory.available(resource) for resource, pages in wanted.items()}
        return any(pages > 0 for pages in short.values()) and self._take_all(short, self._giving_way_to(request))

    def _take_over(self, request: Request) -> bool:
        """Nobody has run here for a while: the pages of seniors that wait for other workers are of use to `request`."""
        seniors = [one for one in reversed(self._inside) if one.seniority < request.seniority]
        return self._force(request, [*self._giving_way_to(request), *seniors])

    def _let_in(self, request: Request) -> bool:
        """Nobody has run here for a while: who waits for other workers gives room and its turn to one in line."""
        idle = [one for one in reversed(self._inside) if one.handle not in self._waits]
        if not self._make_room(request, idle):
            return False
        if self._num_running >= self._max_rows:
            self._stop(next(one for one in idle if one.handle not in self._waits))
        return True

    def _least_important(self, than: Request) -> Request | None:
        """The youngest running request of those less important than `than`."""
        for request in reversed(self._inside):
            if request.seniority[0] <= than.seniority[0]:
                break
            if request.handle not in self._waits:
                return request
        return None

    def _take(
        self, resource: str, missing: int, victims: Iterable[Request], claims: set[int] | frozenset[int] = frozenset()
    ) -> tuple[int, int]:
        """Preempt or mark victims until `missing` pages are covered; `claims`: rows that are missing a page of those
        themselves. Returns pages covered now, and those that come when steps in flight have ended."""
        now = later = 0
        for victim in victims:
            if now + later >= missing:
                break
            pages = self._reclaimable(victim, resource)
            if not pages:
                continue
            covered = pages + (victim.handle in claims)
            if self._requests.removing[victim.handle]:
                later += pages
            elif self._in_flight(victim):
                wait = self._stop(victim)
                if resource not in wait.marked:
                    wait.marked.append(resource)
                later += covered
            else:
                self._stop(victim)
                self._preempt(victim, resource, pages)
                now += covered
        return now, later

    def _preempt(self, victim: Request, resource: str, pages: int) -> None:
        self._memory.preempt(victim.handle, resource)
        wait = self._waits[victim.handle]
        wait.taken[resource] = wait.taken.get(resource, 0) + pages
        if wait.resource == resource:
            wait.resource, wait.needs = "", 0

    def _try(self, request: Request, pledged: dict[str, int]) -> bool:
        """Let it go on if there is room beside a page for each running row; `pledged`: pages that others were let go
        for, and that they take with their next step."""
        wait = self._waits[request.handle]
        running = self._num_running
        if wait.marked or running >= self._max_rows:
            return False
        wanted = self._with_margin(wait)
        if wait.needs:
            wanted = {**wanted, wait.resource: wanted.get(wait.resource, 0) + wait.needs}
        elif wait.resource and wait.num_left == self._num_left:
            return False
        for resource, pages in wanted.items():
            if self._memory.available(resource) - pledged.get(resource, 0) < pages:
                return False
        if wait.taken and not self._memory.resume(request.handle):
            return False
        if wait.needs:
            pledged[wait.resource] = pledged.get(wait.resource, 0) + wait.needs
        self._release(request)
        return True

    def _with_margin(self, wait: Wait) -> Mapping[str, int]:
        """Pages that a preempted request comes back with, and one for each running row and itself."""
        running = self._num_running
        return {resource: pages + running + 1 for resource, pages in wait.taken.items()} if running else wait.taken

    def _force(self, request: Request, victims: Sequence[Request]) -> bool:
        """Let it go on with what there is and what `victims`, which are in no step, can give."""
        wait = self._waits[request.handle]
        wanted = dict(wait.taken)
        if wait.needs:
            wanted[wait.resource] = wanted.get(wait.resource, 0) + wait.needs
        elif wait.resource and wait.num_left == self._num_left and not wait.busy:
            return False
        short = {resource: pages - self._memory.available(resource) for resource, pages in wanted.items()}
        if not self._take_all(short, victims):
            return False
        while wait.taken and not self._memory.resume(request.handle):
            # what it shared with others when it was preempted has gone meanwhile
            if not any(self._take(resource, 1, victims)[0] for resource in list(wait.taken)):
                return False
        self._release(request)
        return True

    def _make_room(self, request: Request, victims: Sequence[Request]) -> bool:
        """Take from `victims` what one that asks to be let in lacks, if they have it. True: `reserve` grants it now.
        Each turn asks again: what it shares with a victim does not become free for it, and what victims share among
        them is given by the last of them."""
        lacking = self._memory.lacking(request.handle)
        able = [victim.handle for victim in victims if any(self._reclaimable(victim, one) for one in lacking)]
        if self._memory.lacking(request.handle, able):
            return False
        while lacking := self._memory.lacking(request.handle):
            given = [self._take(resource, count, victims) for resource, count in lacking.items()]
            if any(later for _, later in given) or not any(now for now, _ in given):
                return False
        return True

    def _take_all(self, missing: Mapping[str, int], victims: Sequence[Request]) -> bool:
        """Take so many pages of each resource, if the victims have them all. True: they are there now."""
        for resource, count in missing.items():
            if sum(self._reclaimable(victim, resource) for victim in victims) < count:
                return False
        later = [self._take(resource, count, victims)[1] for resource, count in missing.items()]
        return not any(later)

    def _reclaimable(self, victim: Request, resource: str) -> int:
        """Pages that it can give and come back."""
        if victim.unstarted:
            return self._memory.unused(victim.handle, resource)
        return self._memory.reclaimable(victim.handle, resource)

    def _is_stuck(self, request: Request) -> bool:
        """It waits for room here, or has given all that it had; it did not only lose its turn."""
        wait = self._waits.get(request.handle)
        return wait is not None and (bool(wait.taken) or self._has_work(request))

    def _in_flight(self, request: Request) -> bool:
        return bool(self._requests.in_steps[request.handle])

    def _has_work(self, request: Request) -> bool:
        return self._graph.ready_behind(request.handle, Gate.HELD)

    def _stop(self, request: Request) -> Wait:
        """Its rows are taken for no further step."""
        wait = self._waits.get(request.handle)
        if wait is None:
            wait = self._waits[request.handle] = Wait()
            insort(self._waiting, request, key=_seniority)
            if self._graph.knows(request.handle):
                self._graph.gate([request.handle], Gate.HELD, True)
        return wait

    def _release(self, request: Request) -> None:
        self._forget(request)
        if self._graph.knows(request.handle):
            self._graph.gate([request.handle], Gate.HELD, False)

    def _forget(self, request: Request) -> None:
        self._waits.pop(request.handle)
        del self._waiting[bisect_left(self._waiting, request.seniority, key=_seniority)]


def _seniority(request: Request) -> tuple[int, int, int]:
    return request.seniority
