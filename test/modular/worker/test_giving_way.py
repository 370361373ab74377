"""Several workers whose requests wait for each other's values and for pages: some always goes on, and all end.

Admission and preemption are real; memory and graph are counters. A request visits its workers in some order and needs
one page more with each visit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mstar.communication.messages import OpenRequest, SamplingParams
from mstar.engine.execution import AdmitOutcome
from mstar.graph.protocol import Gate
from mstar.worker.admission import Admission
from mstar.worker.preemption import Preemption
from mstar.worker.requests import PartitionRun, Request, RequestTable, Seniority
from mstar.worker.rid_table import RidTable

KV = "kv"
ROWS_OF_A_STEP = 3


class Pool:
    """`RequestMemory` with one cache of pages of one token. `movable`: requests that may be preempted; `by_host`: those
    for whose cache there is a place on the host, which is not for requests over several workers."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.movable: set[int] = set()
        self.by_host = False
        self._needs: dict[int, tuple[int, int]] = {}
        self._held: dict[int, int] = {}
        self._promised: dict[int, int] = {}
        self._stored: dict[int, int] = {}

    def introduce(self, handle, config) -> None:
        if self.by_host and config.spans_workers:
            self.movable.discard(handle)
        self._needs[handle] = (config.prompt_ids.size + 1, config.max_total_tokens)

    def most_tokens(self) -> int:
        return self.num_pages

    def available(self, resource: str, without: Sequence[int] = ()) -> int:
        free = self.num_pages - sum(max(held, self._promised[handle]) for handle, held in self._held.items())
        assert free >= 0
        return free + sum(self.reclaimable(one, KV) or self.unused(one, KV) for one in without)

    def grows(self, resource: str) -> bool:
        return True

    def together(self, resource: str) -> Sequence[str]:
        return (resource,)

    def lacking(self, handle: int, without: Sequence[int] = ()) -> dict[str, int]:
        short = self._first(handle) - self.available(KV, without)
        return {KV: short} if short > 0 else {}

    def reserve(self, handle: int) -> bool:
        if self.lacking(handle):
            return False
        self._held[handle], self._promised[handle] = 0, self._first(handle)
        return True

    def close(self, handle: int) -> None:
        for column in (self._needs, self._held, self._promised, self._stored):
            column.pop(handle, None)

    def reclaimable(self, handle: int, resource: str) -> int:
        return self._all(handle) if handle in self.movable else 0

    def unused(self, handle: int, resource: str) -> int:
        return 0 if self._held.get(handle) else self._all(handle)

    def _all(self, handle: int) -> int:
        if handle not in self._held:
            return 0
        return max(self._held[handle], self._promised[handle])

    def preempt(self, handle: int, resource: str) -> None:
        assert self.reclaimable(handle, resource) or self.unused(handle, resource)
        self._stored[handle] = self._held.pop(handle)
        del self._promised[handle]

    def resume(self, handle: int) -> bool:
        pages = max(self._stored[handle] + 1, self._first(handle))
        if pages > self.available(KV):
            return False
        self._held[handle], self._promised[handle] = self._stored.pop(handle), pages
        return True

    def admit(self, handles: list[int]) -> AdmitOutcome:
        """One page more for each, or for none."""
        beyond = [handle for handle in handles if self._held[handle] >= self._promised[handle]]
        missing = len(beyond) - self.available(KV)
        if missing > 0:
            return AdmitOutcome(tuple(beyond[-missing:]), KV, missing)
        for handle in handles:
            self._held[handle] += 1
        return AdmitOutcome()

    def _first(self, handle: int) -> int:
        return self._needs[handle][handle not in self.movable]


@dataclass
class Visitor:
    """A request: `visits` are ranks, one after the other; `next_visit` of them are over. `movable`: ranks where it may
    be preempted at any time."""

    rid: str
    priority: int
    movable: set[int]
    num_prompt: int
    visits: list[int]
    next_visit: int = 0
    opened: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return sorted(set(self.visits))

    @property
    def started(self) -> bool:
        return self.opened == self.ranks

    def at(self, rank: int) -> bool:
        return self.started and self.next_visit < len(self.visits) and self.visits[self.next_visit] == rank


class Machine:
    """One worker, and the part of a graph runtime that preemption asks."""

    def __init__(self, rank: int, num_pages: int, max_rows: int, visitors: dict[str, Visitor]) -> None:
        self.rank = rank
        self.rids = RidTable(64)
        self.requests = RequestTable(64, self.rids)
        self.pool = Pool(num_pages)
        self.preemption = Preemption(
            memory=self.pool,  # pyright: ignore[reportArgumentType]
            graph=self,  # pyright: ignore[reportArgumentType]
            requests=self.requests,
            rids=self.rids,
            max_rows=max_rows,
            patience_s=0.0,
        )
        self.admission = Admission(SimpleNamespace(memory=self.pool), self.preemption)  # pyright: ignore[reportArgumentType]
        self.gated: set[int] = set()
        self._visitors = visitors
        self._num_joined = 0

    def knows(self, handle: int) -> bool:
        return bool(self.requests[handle].partitions)

    def gate(self, handles, bits: Gate, on: bool) -> None:
        self.gated = self.gated.union(handles) if on else self.gated.difference(handles)

    def ready_behind(self, handle: int, gate: Gate) -> bool:
        return self._visitors[self.rids.rid(handle)].at(self.rank)

    def ready(self) -> list[int]:
        here = [self.rids.handle(rid) for rid, visitor in self._visitors.items() if visitor.at(self.rank)]
        return [handle for handle in here if handle is not None and handle not in self.gated][:ROWS_OF_A_STEP]

    def join(self, visitor: Visitor, arrival: int) -> None:
        handle = self.rids.intern(visitor.rid)
        num_visits = visitor.visits.count(self.rank)
        request = Request(
            visitor.rid,
            handle,
            OpenRequest(sampling=SamplingParams(max_tokens=num_visits)),
            np.zeros(visitor.num_prompt, np.int32),
            spans_workers=len(visitor.ranks) > 1,
            seniority=Seniority(visitor.priority, arrival, self._num_joined),
        )
        self._num_joined += 1
        if self.rank in visitor.movable:
            self.pool.movable.add(handle)
        self.requests.put(request)
        self.admission.check(request)
        self.admission.join(request)

    def start(self, visitor: Visitor) -> None:
        handle = self.rids.handle(visitor.rid)
        assert handle is not None
        self.requests[handle].partitions["main"] = PartitionRun(deque(), True, {})
        self.preemption.waiting.started(self.requests[handle])

    def leave(self, visitor: Visitor) -> None:
        handle = self.rids.handle(visitor.rid)
        assert handle is not None
        self.admission.leave(self.requests[handle])
        self.pool.movable.discard(handle)
        self.gated.discard(handle)
        self.rids.release(handle)

    def tick(self) -> list[str]:
        """The stages up to a step, which is over at once. Returns requests that were let in."""
        preemption = self.preemption
        preemption.take_marked()
        opened = [request.rid for request in self.admission.admitted()]
        if preemption.readmit(self.admission.first):
            opened += [request.rid for request in self.admission.admitted()]
        while (failed := preemption.unblock(self.admission.first, idle=not self.ready())) is not None:
            assert not failed
            opened += [request.rid for request in self.admission.admitted()]
        while handles := self.ready():
            outcome = self.pool.admit(handles)
            if outcome.ok:
                for handle in handles:
                    self._visitors[self.rids.rid(handle)].next_visit += 1
                break
            preemption.refused(outcome, busy=False)
        return opened


VISITORS = st.lists(
    st.tuples(
        st.sampled_from((0, 0, 0, 1)),  # priority
        st.booleans(),  # there is a place on the host for it, where there is for some only
        st.integers(1, 3),  # prompt
        st.lists(st.sampled_from((0, 0, 1, 1, 2)), min_size=1, max_size=14),  # visits
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(
    drawn=VISITORS,
    spare=st.integers(0, 3),
    max_rows=st.integers(2, 8),
    pauses=st.lists(st.integers(0, 4), min_size=8, max_size=8),
    numbered=st.booleans(),
    moving=st.sampled_from(((0, 1, 2), (), (0,), (1, 2))),
    mixed=st.sampled_from((None, None, 0, 1)),
)
@example(
    drawn=[
        (1, True, 2, [0, 1, 1, 0, 0, 1]),
        (0, False, 2, [2, 1, 0, 2, 0, 1]),
        (0, False, 3, [1, 2, 0, 2, 2, 1, 0]),
        (0, False, 3, [2]),
        (0, True, 1, [2, 1, 0, 0, 1]),
        (0, False, 3, [0, 1]),
    ],
    spare=0,
    max_rows=7,
    pauses=[4, 4, 1, 1, 3, 4, 2, 0],
    numbered=False,
    moving=(1, 2),
    mixed=1,
)
def test_every_request_ends_whatever_it_visits(drawn, spare, max_rows, pauses, numbered, moving, mixed):
    """The example is a circle where the host's room makes a difference between requests over several workers.

    `numbered`: all workers order alike. `moving`: ranks whose requests may be preempted at any time; at rank `mixed`
    some may, because the host has no room for more."""
    visitors: dict[str, Visitor] = {}
    num_pages = spare + max(num_prompt + max(map(visits.count, visits)) for _, _, num_prompt, visits in drawn)
    machines = [Machine(rank, num_pages, max_rows, visitors) for rank in range(3)]
    for machine in machines:
        machine.pool.by_host = machine.rank == mixed
    waiting = [
        (
            pause,
            Visitor(f"r{index}", priority, {*moving} | {mixed} if hosted else {*moving} - {mixed}, num_prompt, visits),
        )
        for index, ((priority, hosted, num_prompt, visits), pause) in enumerate(zip(drawn, pauses, strict=False))
    ]
    num_visits = sum(len(visitor.visits) for _, visitor in waiting)
    arrivals = {visitor.rid: index * numbered for index, (_, visitor) in enumerate(waiting)}
    pause = 0
    for _ in range(40 + 40 * num_visits):
        while waiting and pause == 0:
            pause, visitor = waiting.pop(0)
            visitors[visitor.rid] = visitor
            machines[visitor.ranks[0]].join(visitor, arrivals[visitor.rid])
        pause = max(pause - 1, 0)
        for machine in machines:
            for rid in machine.tick():
                _opened(visitors[rid], machines, machine.rank, arrivals[rid])
        for visitor in [one for one in visitors.values() if one.next_visit == len(one.visits)]:
            del visitors[visitor.rid]
            for rank in visitor.ranks:
                machines[rank].leave(visitor)
        if not visitors and not waiting:
            break
    assert not visitors, f"they wait for ever: {visitors}"
    for machine in machines:
        assert (machine.pool.available(KV), machine.preemption.num_inside, len(machine.admission)) == (num_pages, 0, 0)


def _opened(visitor: Visitor, machines: list[Machine], rank: int, arrival: int) -> None:
    """As the front does: open on the next worker, start when all have opened."""
    visitor.opened.append(rank)
    if visitor.started:
        for other in visitor.ranks:
            machines[other].start(visitor)
    else:
        machines[visitor.ranks[len(visitor.opened)]].join(visitor, arrival)
