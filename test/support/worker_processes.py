"""Real worker processes of a deployment, with a front that only keeps books: everything between workers is real."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from support.front_books import GREEDY, FrontBooks, Result
from support.instance import shared_memory_of

from mstar.communication import arena
from mstar.communication.address import FRONT_RANK, InstanceDir, peer_name
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import Heartbeat, Ready, SamplingParams, Shutdown, ToFront
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
        self._supervisor = ZmqBus(self._instance.address("supervisor", 0), decode_to_supervisor)
        self._bus: ZmqBus[ToFront] = ZmqBus(self._address(FRONT_RANK), self._decode)
        self._ranks = list(range(deployment.config.num_workers))
        self.books = FrontBooks(self.model, deployment.compile(self.model), len(self._ranks), self._bus)
        self.results = self.books.results
        self.children: list[Child] = []
        self.left_behind: list[str] = []
        """Shared memory that the workers had not removed when they ended."""

    def __enter__(self) -> WorkerProcesses:
        for rank in self._ranks:
            self.children.append(start_child(self._spec(rank)))
            self._bus.connect(peer_name(rank), self._address(rank))
        ready: set[int] = set()
        deadline = time.monotonic() + START_S
        while len(ready) < len(self._ranks):
            self._supervisor.wait(1.0)
            ready |= {message.rank for message in self._supervisor.receive() if isinstance(message, Ready)}
            ended = [child.how_it_ended() for child in self.children if child.exit_code() is not None]
            if ended or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(f"workers did not start; ready: {sorted(ready)}; ended: {ended}")
        return self

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
            arena.reclaim(self._instance.instance, rank, 0)
        self._bus.close()
        self._supervisor.close()
        self._instance.close()

    def submit(self, rid: str, prompt: PreparedPrompt, sampling: SamplingParams = GREEDY) -> Result:
        return self.books.submit(rid, prompt, sampling)

    def run(self, timeout_s: float = 120.0) -> dict[str, Result]:
        """Until every request is done."""
        deadline = time.monotonic() + timeout_s
        while not self.books.done:
            self._bus.wait(1.0)
            self.books.read()
            ended = [f"{child.name} {child.how_it_ended()}" for child in self.children if child.exit_code() is not None]
            assert not ended, f"workers ended: {ended}"
            if time.monotonic() > deadline:
                stuck = [result for result in self.results.values() if not result.done]
                raise AssertionError(f"not done after {timeout_s} s: {stuck}")
        return self.results

    def await_gauge(self, name: str, value: float, timeout_s: float = 20.0) -> None:
        """Until every worker that reports the gauge reports `value` in a heartbeat from now on."""
        self.gauges.clear()
        deadline = time.monotonic() + timeout_s
        while len(self.gauges) < len(self._ranks) or any(self._others(name, value)):
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
        return self._instance.address(peer_name(rank), 0)

    def _spec(self, rank: int) -> ChildSpec:
        return ChildSpec(
            role="worker",
            instance=self._instance.instance,
            rank=rank,
            incarnation=0,
            address=self._address(rank),
            supervisor_address=self._instance.address("supervisor", 0),
            parent_pid=os.getpid(),
            facts=self.deployment.facts,
            peers=tuple(
                PeerAddress(other, 0, self._address(other)) for other in (FRONT_RANK, *self._ranks) if other != rank
            ),
            log_level="warning",
        )
