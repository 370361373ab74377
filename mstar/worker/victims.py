"""`Victims`: takes pages from requests, at once or as soon as no step has their rows.

Runs on the worker's loop thread. Who may be taken from, and for whom, is `Preemption`'s; it moves no page itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from mstar.engine.request_memory import RequestMemory
from mstar.worker.requests import Request, RequestTable
from mstar.worker.waiting import Waiting


class Given(NamedTuple):
    """Pages: available `now`, and `later`, when steps in flight have ended."""

    now: int
    later: int


class Victims:
    """See the module docstring. Whoever is taken from waits from then on."""

    def __init__(self, memory: RequestMemory, requests: RequestTable, waiting: Waiting) -> None:
        self._memory = memory
        self._requests = requests
        self._waiting = waiting

    def take(
        self, resource: str, missing: int, victims: Iterable[Request], claims: Collection[int] = frozenset()
    ) -> Given:
        """Take from one after the other until `missing` pages are covered. `claims`: rows that are short of a page of
        those themselves."""
        now = later = 0
        for victim in victims:
            if now + later >= missing:
                break
            pages = self._can_give(victim, resource)
            if not pages:
                continue
            covered = pages + (victim.handle in claims)
            if self._requests.removing[victim.handle]:
                later += pages
            elif self.in_flight(victim):
                wait = self._waiting.stop(victim)
                if resource not in wait.marked:
                    wait.marked.append(resource)
                later += covered
            else:
                self._waiting.stop(victim)
                self._preempt(victim, resource, pages)
                now += covered
        return Given(now, later)

    def take_all(self, missing: Mapping[str, int], victims: Sequence[Request]) -> bool:
        """Take so many pages of each resource, if the victims have them all together. True: they are there now."""
        for resource, count in missing.items():
            able = [victim.handle for victim in victims if count > 0 and self._can_give(victim, resource)]
            if count > max(self._memory.available(resource, able) - self._memory.available(resource), 0):
                return False
        return not any(one.later for one in self._take_each(missing, victims))

    def make_room(self, request: Request, victims: Sequence[Request]) -> bool:
        """Take what one that asks to be let in lacks, if the victims have it. True: `reserve` grants it now. Each turn
        asks again: what it shares with a victim does not become free for it, and what victims share among them is given
        by the last of them."""
        lacking = self._memory.lacking(request.handle)
        able = [victim.handle for victim in victims if any(self._can_give(victim, one) for one in lacking)]
        if self._memory.lacking(request.handle, able):
            return False
        while lacking := self._memory.lacking(request.handle):
            given = self._take_each(lacking, victims)
            if any(one.later for one in given) or not any(one.now for one in given):
                return False
        return True

    def take_marked(self) -> bool:
        """Preempt those whose step has ended. True: there were some."""
        taken = False
        for request in self._waiting:
            marked = self._waiting[request].marked
            if marked and not self.in_flight(request):
                for resource in marked:
                    if pages := self._can_give(request, resource):
                        self._preempt(request, resource, pages)
                marked.clear()
                taken = True
        return taken

    def in_flight(self, request: Request) -> bool:
        return bool(self._requests.in_steps[request.handle])

    def _take_each(self, missing: Mapping[str, int], victims: Sequence[Request]) -> list[Given]:
        """Of each resource what is missing once the others have been taken: some are lost together."""
        before = {resource: self._memory.available(resource) for resource in missing}
        given: list[Given] = []
        for resource, count in missing.items():
            gained = self._memory.available(resource) - before[resource]
            given.append(self.take(resource, count - max(gained, 0), victims))
        return given

    def _can_give(self, victim: Request, resource: str) -> int:
        """Pages that it can give and come back."""
        if victim.unstarted:
            return self._memory.unused(victim.handle, resource)
        return self._memory.reclaimable(victim.handle, resource)

    def _preempt(self, victim: Request, resource: str, pages: int) -> None:
        lost = {one: self._can_give(victim, one) for one in self._memory.together(resource)}
        self._memory.preempt(victim.handle, resource)
        wait = self._waiting[victim]
        for one, count in (lost | {resource: pages}).items():
            if count:
                wait.taken[one] = wait.taken.get(one, 0) + count
            if wait.resource == one:
                wait.resource, wait.needs = "", 0
