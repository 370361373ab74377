"""Real worker processes of a deployment, with a front that only keeps books: everything between workers is real."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from support.front_books import GREEDY, FrontBooks, Result
from support.instance import shared_memory_of

from mstar.communication import arena
from mstar.communication.address import FRONT_RANK, SUPERVISOR, InstanceDir, peer_name
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import Heartbeat, PeerLost, PeerUp, Ready, SamplingParams, Shutdown, ToFront
from mstar.communication.wire import decode_to_front, decode_to_supervisor
from mstar.launch.children import Child, ChildSpec, PeerAddress, start_child
from mstar.launch.deployment import Deployment
from mstar.model.base import PreparedPrompt

START_S = 120.0
"""Importing torch in three processes at once on a busy machine of two cores takes its time."""
END_S = 20.0


class WorkerProcesses:
    """Starts one process per rank of `deployment`; `base` is where the sockets go. A context manager: no process, no
    socket and no shared memory outlives it."""

    def __init__(self, deployment: Deployment, base: Path) -> None:
        self.deployment = deployment
        self.model = deployment.model()
        self.gauges: dict[int, dict[str, float]] = {}
        self._instance = InstanceDir.create(base)
        self.name = self._instance.instance
        self._supervisor = ZmqBus(self._instance.address(SUPERVISOR, 0), decode_to_supervisor)
        self._ranks = list(range(deployment.config.num_workers))
        self._incarnations = dict.fromkeys(self._ranks, 0)
        self._bus: ZmqBus[ToFront] = ZmqBus(self._address(FRONT_RANK), self._decode)
        self.books = FrontBooks(self.model, deployment.compile(self.model), len(self._ranks), self._bus)
        self.results = self.books.results
        self.children: list[Child] = []
        self.left_behind: list[str] = []
        """Shared memory that the workers had not removed when they ended."""

    def __enter__(self) -> WorkerProcesses:
        for rank in self._ranks:
            self.children.append(start_child(self._spec(rank)))
            self._bus.connect(peer_name(rank), self._address(rank))
        self._await_ready(set(self._ranks))
        return self

    def _await_ready(self, awaited: set[int]) -> None:
        ready: set[int] = set()
        deadline = time.monotonic() + START_S
        while not ready >= awaited:
            self._supervisor.wait(1.0)
            ready |= {message.rank for message in self._supervisor.receive() if isinstance(message, Ready)}
            ended = [child.how_it_ended() for child in self.children if child.exit_code() is not None]
            if ended or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(f"workers did not start; ready: {sorted(ready)}; ended: {ended}")

    def lose(self, rank: int) -> None:
        """SIGKILL, and what a supervisor does about it: the others are told, the shared memory goes."""
        self.children[rank].kill()
        self.children[rank].close()
        self._bus.disconnect(peer_name(rank))
        for other in self._ranks:
            if other != rank:
                self._bus.send(peer_name(other), (PeerLost(rank, self._incarnations[rank], "killed by signal 9"),))
        arena.reclaim(self.name, rank, self._incarnations[rank])
        self.gauges.pop(rank, None)
        self.books.lose()

    def restart(self, rank: int) -> None:
        """The next incarnation of a lost rank, once it is ready."""
        self._incarnations[rank] += 1
        self.children[rank] = start_child(self._spec(rank))
        self._bus.connect(peer_name(rank), self._address(rank))
        for other in self._ranks:
            if other != rank:
                up = PeerUp(rank, self._incarnations[rank], self._address(rank))
                self._bus.send(peer_name(other), (up,))
        self._await_ready({rank})

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            self._bus.send(peer_name(rank), (Shutdown(),))
        deadline = time.monotonic() + END_S
        for child in self.children:
            while child.exit_code() is None and time.monotonic() < deadline:
                self._bus.wait(0.05)
                self._bus.receive()
            child.kill()
            child.close()
        self.left_behind = shared_memory_of(self.name)
        for rank in self._ranks:
            arena.reclaim(self._instance.instance, rank, self._incarnations[rank])
        self._bus.close()
        self._supervisor.close()
        self._instance.close()

    def submit(
        self,
        rid: str,
        prompt: PreparedPrompt,
        sampling: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Result:
        return self.books.submit(rid, prompt, sampling, priority=priority, cache_salt=cache_salt)

    def run(self, timeout_s: float = 120.0) -> dict[str, Result]:
        """Until every request is done."""
        deadline = time.monotonic() + timeout_s
        while not self.books.done:
            self.read()
            ended = [f"{child.name} {child.how_it_ended()}" for child in self.children if child.exit_code() is not None]
            assert not ended, f"workers ended: {ended}"
            if time.monotonic() > deadline:
                stuck = [result for result in self.results.values() if not result.done]
                raise AssertionError(f"not done after {timeout_s} s: {stuck}")
        return self.results

    def read(self, timeout_s: float = 1.0) -> None:
        """Wait for something to arrive, and take it."""
        self._bus.wait(timeout_s)
        self.books.read()

    def await_gauge(self, name: str, value: float, timeout_s: float = 20.0) -> None:
        """Until every living worker that reports the gauge reports `value` in a heartbeat from now on."""
        self.gauges.clear()
        num_alive = sum(child.exit_code() is None for child in self.children)
        deadline = time.monotonic() + timeout_s
        while len(self.gauges) < num_alive or any(self._others(name, value)):
            self._bus.wait(1.0)
            self.books.read()
            assert time.monotonic() < deadline, f"{name}: {list(self._others(name, value))}, expected {value}"

    def _others(self, name: str, value: float) -> Iterator[float]:
        """Values of the gauge that are not `value`, of workers that have it."""
        return (gauges[name] for gauges in self.gauges.values() if gauges.get(name, value) != value)

    def _decode(self, frame: bytes | bytearray | memoryview) -> ToFront:
        message = decode_to_front(frame)
        if isinstance(message, Heartbeat):
            self.gauges[message.rank] = message.gauges
        return message

    def _address(self, rank: int) -> str:
        return self._instance.address(peer_name(rank), self._incarnations.get(rank, 0))

    def _spec(self, rank: int) -> ChildSpec:
        return ChildSpec(
            role="worker",
            instance=self._instance.instance,
            rank=rank,
            incarnation=self._incarnations[rank],
            address=self._address(rank),
            supervisor_address=self._instance.address(SUPERVISOR, 0),
            parent_pid=os.getpid(),
            facts=self.deployment.facts,
            peers=tuple(
                PeerAddress(other, self._incarnations.get(other, 0), self._address(other))
                for other in (FRONT_RANK, *self._ranks)
                if other != rank
            ),
            log_level="warning",
        )
