"""The worker process: builds its rank, says that it is ready and runs the loop until it is told to end."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

import torch

import mstar
from mstar.communication.address import FRONT_RANK, SUPERVISOR, peer_name
from mstar.communication.bus import Bus, ZmqBus
from mstar.communication.messages import Hello, LoadProgress, MemoryPlan, PeerUp, PlanRow, Ready, ToWorker
from mstar.communication.wire import decode_to_worker, schema_hash
from mstar.launch.calibration import calibrate_steps
from mstar.launch.children import ChildSpec
from mstar.launch.deployment import open_deployment
from mstar.launch.engine_start import start_engine
from mstar.launch.machine import torch_threads
from mstar.launch.rank import Place, build_rank
from mstar.worker.heartbeat import HeartbeatThread
from mstar.worker.worker import WorkerParts


def run_worker_process(spec: ChildSpec) -> None:
    """Until `Shutdown`. An exception ends the process; the supervisor sees to the rest."""
    deployment = open_deployment(spec.facts)
    bus: ZmqBus[ToWorker] = ZmqBus(spec.address, decode_to_worker)
    bus.connect(SUPERVISOR, spec.supervisor_address)
    torch.set_num_threads(torch_threads(deployment.config))
    torch.set_grad_enabled(False)
    model = deployment.model()

    def announce(rows: Sequence[PlanRow]) -> None:
        bus.send(SUPERVISOR, (MemoryPlan(rank=spec.rank, rows=tuple(rows)),))

    compiled = deployment.compile(model)
    worker, parts = build_rank(
        deployment,
        model,
        compiled,
        Place(spec.instance, spec.rank, spec.incarnation),
        bus,
        progress=_LoadReports(bus, spec.rank),
        announce=announce,
    )
    start_engine(parts.engine)
    calibrate_steps(deployment.config, compiled, spec.rank, parts)
    gc.collect()
    gc.freeze()  # what was loaded stays; collections during serving need not walk it
    parts.inbox.apply([PeerUp(peer.rank, peer.incarnation, peer.address) for peer in spec.peers])
    parts.constrained.warm()
    heartbeat, heartbeat_bus = _start_heartbeat(spec, parts, deployment.config.server.step_timeout_s)
    _announce(spec, parts, bus)
    try:
        worker.run()
    finally:
        heartbeat.close()
        heartbeat_bus.close()
        worker.close()
        bus.close()


def _announce(spec: ChildSpec, parts: WorkerParts, bus: Bus[ToWorker]) -> None:
    hello = Hello(
        rank=spec.rank,
        incarnation=spec.incarnation,
        version=mstar.__version__,
        schema_hash=schema_hash(),
        pid=os.getpid(),
    )
    ready = Ready(
        rank=spec.rank,
        incarnation=spec.incarnation,
        max_total_tokens=parts.engine.memory.most_tokens() or 0,
    )
    bus.send(peer_name(FRONT_RANK), (hello, ready))
    bus.send(SUPERVISOR, (ready,))


def _start_heartbeat(
    spec: ChildSpec, parts: WorkerParts, step_timeout_s: float
) -> tuple[HeartbeatThread, Bus[ToWorker]]:
    """On a socket of its own: sockets belong to one thread."""
    bus: ZmqBus[ToWorker] = ZmqBus(None, decode_to_worker)
    front = next(peer for peer in spec.peers if peer.rank == FRONT_RANK)
    bus.connect(peer_name(FRONT_RANK), front.address)
    parts.counters.refresh(parts.age)
    heartbeat = HeartbeatThread(
        bus, peer_name(FRONT_RANK), spec.rank, spec.incarnation, parts.age, step_timeout_s=step_timeout_s
    )
    heartbeat.start()
    return heartbeat, bus


class _LoadReports:
    """Load progress towards the supervisor, one message per percent."""

    def __init__(self, bus: Bus[ToWorker], rank: int) -> None:
        self._bus = bus
        self._rank = rank
        self._reported = ("", -1)

    def __call__(self, label: str, done_bytes: int, total_bytes: int | None, /) -> None:
        percent = done_bytes * 100 // total_bytes if total_bytes else 0
        if (label, percent) != self._reported:
            self._reported = (label, percent)
            report = LoadProgress(rank=self._rank, label=label, done=done_bytes, total=total_bytes or 0)
            self._bus.send(SUPERVISOR, (report,))
