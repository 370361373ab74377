"""A cluster of simulated workers: random order of openings, messages and steps, until every request has ended.

Messages arrive in order per pair of workers. A request has another handle on each worker.
"""

from __future__ import annotations

import random
from collections import deque

from support.graph_programs import Program
from support.graph_worker import Chances, Emits, Frame, SimulatedWorker

from mstar.graph.compile import CompiledGraph
from mstar.graph.program import Route


class Cluster:
    """Workers, the channels between them, and what reached the client."""

    def __init__(
        self, program: Program, compiled: CompiledGraph, num_requests: int, rng: random.Random, chances: Chances
    ) -> None:
        self.program = program
        self.compiled = compiled
        self.rng = rng
        self.chances = chances
        ranks = sorted(set(compiled.placement.values()))
        self.channels: dict[tuple[int, int], deque[Frame]] = {(a, b): deque() for a in ranks for b in ranks if a != b}
        nodes = [node for walk_program in compiled.programs.values() for node in walk_program.nodes]
        self.signals = {node.key: [route.signal for route in node.routes] for node in nodes}
        self.live = {
            node.key: [
                route.signal
                for route in node.routes
                if route.live_ok and self._may_live(node.key.walk, route) and rng.random() < 0.8
            ]
            for node in nodes
        }
        self.emits: list[Emits] = [{} for _ in range(num_requests)]
        self.failed: set[int] = set()
        self.workers = {rank: SimulatedWorker(self, rank) for rank in ranks}
        self.to_open = [
            (request, partition.name, rank)
            for request in range(num_requests)
            for partition in compiled.partitions
            for rank in partition.ranks
        ]
        rng.shuffle(self.to_open)

    def _may_live(self, walk: str, route: Route) -> bool:
        """Always made, and if persisted then taken by the next walk only."""
        if route.signal in self.program.behaviour.maybe_absent:
            return False
        if not route.persists:
            return True
        for plan in self.program.plans.values():
            takers = [
                i
                for i, taking in enumerate(plan)
                for (name, _), compiled in self.compiled.programs.items()
                if name == taking and any(external.name == route.signal for external in compiled.externals)
            ]
            if walk in plan:
                return plan.count(walk) == 1 and takers in ([], [plan.index(walk) + 1])
        return False

    def inputs(self, request: int, partition: str) -> list[tuple[str, int]]:
        """Request inputs; each request brings other values."""
        names = self.program.request_inputs.get(partition, [])
        return [(name, 1000 * (request + 1) + i) for i, name in enumerate(names)]

    def run(self, max_events: int = 20000) -> None:
        """Until every request has ended everywhere.

        Raises:
            AssertionError: something waits for ever, or an invariant is broken.
        """
        idle = 0
        for _ in range(max_events):
            if self._finished():
                break
            idle = 0 if self._event() else idle + 1
            if idle > 40:
                released = [worker.release_held() for worker in self.workers.values()]
                assert any(released) or idle < 200, self._stuck()
        else:
            raise AssertionError(f"not over after {max_events} events: {self._stuck()}")
        for request in range(len(self.emits)):
            for worker in self.workers.values():
                assert worker.remove(request)
        for worker in self.workers.values():
            assert not worker.books.values, f"worker {worker.rank} kept {worker.books.values}"
            assert not worker.graph.ready_keys()

    def _event(self) -> bool:
        if self.to_open and self.rng.random() < 0.3:
            request, partition, rank = self.to_open.pop()
            if request not in self.failed:
                walks = self.program.plans.get(partition, [])
                self.workers[rank].open(request, partition, self.inputs(request, partition), walks)
            return True
        full = [channel for channel, frames in self.channels.items() if frames]
        if full and self.rng.random() < 0.5:
            channel = self.rng.choice(full)
            self.workers[channel[1]].receive(self.channels[channel].popleft())
            return True
        for request in self.failed:
            for worker in self.workers.values():
                worker.remove(request)
        return self.rng.choice(list(self.workers.values())).tick()

    def _finished(self) -> bool:
        if self.to_open or any(self.channels.values()) or any(worker.step for worker in self.workers.values()):
            return False
        return all(
            (worker.handle(request), partition.name) in worker.done or request in self.failed
            for request in range(len(self.emits))
            for partition in self.compiled.partitions
            for rank, worker in self.workers.items()
            if rank in partition.ranks
        )

    def _stuck(self) -> str:
        lines = []
        for worker in self.workers.values():
            open_rows = [row for row in worker.pending if row not in worker.done and row[0] not in worker.gone]
            lines.append(f"worker {worker.rank}: ready {worker.graph.ready_keys()}, not done {open_rows}")
        return "; ".join(lines)
