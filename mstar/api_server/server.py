"""Entry of the front process: one uvloop with the bus, the conductor and the HTTP server on it.

It serves on a socket that the launcher has bound, and ends in order: on `Shutdown` or SIGTERM new requests are refused
while running ones finish, with the listener open; then the server closes and the process exits 0. A second SIGTERM ends
it at once. SIGINT is the supervisor's to decide on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
import uvloop
from fastapi import FastAPI

from mstar import __version__
from mstar.api_server.app import create_app
from mstar.api_server.connection import FrontProtocol, raise_descriptor_limit
from mstar.api_server.front_state import FrontState
from mstar.api_server.loop_watch import LoopWatch
from mstar.api_server.media import MediaLoader
from mstar.communication.address import FRONT_RANK, SUPERVISOR
from mstar.communication.bus import Bus, ZmqBus
from mstar.communication.messages import Hello, Ready, ToFront
from mstar.communication.wire import decode_to_front, schema_hash
from mstar.conductor.conductor import Conductor
from mstar.conductor.front_spec import FrontSpec
from mstar.conductor.handle import ConductorHandle
from mstar.conductor.preprocess import PreprocessPool, auto_processes
from mstar.conductor.walks import WalkDirectory
from mstar.conductor.workers import WorkerTable
from mstar.config.api_keys import accepted_keys
from mstar.graph.picture import picture
from mstar.model.loader.tokenizer_files import load_tokenizer
from mstar.model.registry import build_model

logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 75
CLOSE_CONNECTIONS_S = 5
"""For what is written but not yet read, once the last request has ended."""


def run_front(spec: FrontSpec, listener: socket.socket) -> int:
    """Runs the front process on `listener`, a bound socket, until it is told to end; returns the exit code."""
    FrontProtocol.max_connections = raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Front(spec, listener).run())
    return 0


class FrontServer(uvicorn.Server):
    """uvicorn without its signal handlers: they close the listener first and exit 143."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What runs on the front's loop, around one bus."""

    app: FastAPI
    conductor: Conductor
    handle: ConductorHandle
    pool: PreprocessPool


def assemble_front(
    spec: FrontSpec,
    bus: Bus[ToFront],
    loop: asyncio.AbstractEventLoop,
    *,
    on_ready: Callable[[], None] = lambda: None,
    on_shutdown: Callable[[], None] = lambda: None,
) -> FrontParts:
    """Makes the parts; starts nothing. `on_ready`: all workers are ready. `on_shutdown`: the supervisor asks for the
    end."""
    model = build_model(spec.card, spec.setup)
    walks = WalkDirectory(model, spec.placement)
    server, directory = spec.server, spec.setup.tokenizer_dir
    workers = WorkerTable(walks.all_ranks, watchdog_s=server.watchdog_s, step_timeout_s=server.step_timeout_s)
    conductor = Conductor(bus=bus, walks=walks, workers=workers, loop=loop, on_ready=on_ready, on_shutdown=on_shutdown)
    num_processes = auto_processes() if server.preprocess_workers == "auto" else server.preprocess_workers
    pool = PreprocessPool(spec.card, spec.setup, num_processes, log_format=server.log_format)
    handle = ConductorHandle(
        model=model,
        conductor=conductor,
        walks=walks,
        workers=workers,
        pool=pool,
        max_rows=spec.max_rows,
        max_queue=spec.max_queue,
        request_timeout_s=server.request_timeout_s,
    )
    state = FrontState(
        handle=handle,
        tokenizer=None if directory is None else load_tokenizer(directory),
        served_names=spec.served_names,
        max_body_bytes=server.max_body_bytes,
        media=MediaLoader(server.media),
        api_keys=accepted_keys(server),
        cors_origins=server.cors_origins,
        graph=picture(model.walks(), model.partitions(), spec.placement),
    )
    return FrontParts(create_app(state), conductor, handle, pool)


class _Front:
    """The process: signals, the supervisor, start and end."""

    def __init__(self, spec: FrontSpec, listener: socket.socket) -> None:
        self._spec = spec
        self._listener = listener
        self._drain = asyncio.Event()
        self._bus: Bus[ToFront] = ZmqBus(spec.address, decode_to_front)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        self._hello()
        parts = assemble_front(self._spec, self._bus, loop, on_ready=self._tell_ready, on_shutdown=self._drain.set)
        server = FrontServer(uvicorn_config(parts.app))
        watch = LoopWatch(loop, self._spec.server.watchdog_s)
        watch.start()
        try:
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            await parts.pool.start()
            self._bus.attach(loop, parts.conductor.on_messages)
            gc.freeze()  # what start-up made lives as long as the process; no collection needs to look at it
            await self._until_drained(parts.handle, serving)
            server.should_exit = True
            await serving
        finally:
            watch.close()
            parts.conductor.close()
            parts.pool.close()
            self._bus.close()

    async def _until_drained(self, handle: ConductorHandle, serving: asyncio.Task[None]) -> None:
        told = asyncio.create_task(self._drain.wait())
        await asyncio.wait((told, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():  # it ends by itself only when it fails
            told.cancel()
            await serving
            raise RuntimeError("the HTTP server ended")
        logger.info("draining; running requests: %d", handle.num_live)
        handle.begin_drain()
        await handle.drained(self._spec.server.drain_timeout_s)

    def _hello(self) -> None:
        spec = self._spec
        if spec.supervisor_address is not None:
            self._bus.connect(SUPERVISOR, spec.supervisor_address)
            hello = Hello(
                rank=FRONT_RANK,
                incarnation=spec.incarnation,
                version=__version__,
                schema_hash=schema_hash(),
                pid=os.getpid(),
            )
            self._bus.send(SUPERVISOR, (hello,))

    def _tell_ready(self) -> None:
        ready = Ready(rank=FRONT_RANK, incarnation=self._spec.incarnation, max_total_tokens=0)
        self._bus.send(SUPERVISOR, (ready,))

    def _on_sigterm(self) -> None:
        if self._drain.is_set():
            os._exit(1)  # asked twice: nothing here is worth waiting for, and children die with this process
        self._drain.set()


def uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=FrontProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
    )
