"""A front on a real HTTP socket in a thread of this process, with a scripted worker on a loopback bus behind it."""

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop
from support.fake_worker import FakeWorker, Script
from support.tiny_text import llama_config, write_tokenizer
from tokenizers import Tokenizer

from mstar.api_server.server import FrontParts, FrontServer, assemble_front, uvicorn_config
from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.loopback import LoopbackNet
from mstar.communication.messages import PeerUp
from mstar.communication.wire import decode_to_front, decode_to_worker
from mstar.conductor.front_spec import FrontSpec
from mstar.config.schema import ServerConfig
from mstar.model.base import ModelSetup
from mstar.model.registry import find_card

MAX_SEQ_LEN = 256
MODEL = "tiny"
T = TypeVar("T")


def build_spec(directory: Path, **changes: Any) -> FrontSpec:
    """A spec for a tiny Llama whose tokenizer is written to `directory`."""
    tokenizer = write_tokenizer(directory)
    spec = FrontSpec(
        instance="test",
        address=peer_name(FRONT_RANK),
        supervisor_address=None,
        card=find_card("llama"),
        setup=ModelSetup(config=llama_config(tokenizer), tokenizer_dir=directory, max_seq_len=MAX_SEQ_LEN),
        served_names=(MODEL, "org/tiny-alias"),
        placement={"LLM": 0},
        server=ServerConfig(),
        max_queue=64,
        log_level="warning",
    )
    return replace(spec, **changes)


@dataclass
class RunningFront:
    """Use as a context. `worker.script` may be changed between requests; `call` runs something on the loop."""

    spec: FrontSpec
    tokenizer: Tokenizer
    script: Script
    with_worker: bool = True
    net: LoopbackNet = field(default_factory=LoopbackNet)
    base_url: str = ""

    def __enter__(self) -> "RunningFront":
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = "http://127.0.0.1:%d" % self._listener.getsockname()[1]
        self._is_up = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_up.wait(60)
        if self._error is not None:
            raise self._error
        self.http = httpx.Client(base_url=self.base_url, timeout=30)
        if self.with_worker:
            self.wait_until(lambda: self.http.get("/ready").status_code == 200)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(setattr, self.server, "should_exit", True)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10) -> None:
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.01)):
            if condition():
                return
            pause.wait(0.01)
        raise AssertionError("the condition did not become true in time")

    def start_worker(self, rank: int = 0, incarnation: int = 0, **changes: Any) -> FakeWorker:
        """A new worker process's part: call it on the loop."""
        address = f"{peer_name(rank)}.{incarnation}"
        bus = self.net.bus(address, decode_to_worker)
        bus.connect(peer_name(FRONT_RANK), self.spec.address)
        worker = FakeWorker(bus, self.script, rank=rank, incarnation=incarnation, **changes)
        worker.run_on(self._loop)
        self.parts.conductor.on_messages([PeerUp(rank, incarnation, address)])
        return worker

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._is_up.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        bus = self.net.bus(self.spec.address, decode_to_front)
        self.parts: FrontParts = assemble_front(self.spec, bus, self._loop)
        self.server = FrontServer(uvicorn_config(self.parts.app))
        await self.parts.pool.start()
        bus.attach(self._loop, self.parts.conductor.on_messages)
        if self.with_worker:
            self.worker = self.start_worker()
        self._is_up.set()
        try:
            await self.server.serve(sockets=[self._listener])
        finally:
            self.parts.conductor.close()
            self.parts.pool.close()
            bus.close()
