"""A front on a real HTTP socket in a thread of this process, with a scripted worker on a loopback bus behind it."""

import asyncio
import json
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
from mstar.communication.messages import OpenRequest, PeerUp, StartWalk
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
        address=peer_name(FRONT_RANK),
        supervisor_address=None,
        card=find_card("llama"),
        setup=ModelSetup(config=llama_config(tokenizer), tokenizer_dir=directory, max_seq_len=MAX_SEQ_LEN),
        served_names=(MODEL, "org/tiny-alias"),
        placement={"LLM": 0},
        server=ServerConfig(),
        max_queue=512,
    )
    return replace(spec, **changes)


@dataclass
class Streamed:
    """A parsed event stream. `chunks`: JSON of every data event; `errors`: of every error event; `is_done`: `[DONE]`
    came, and came last."""

    response: httpx.Response
    chunks: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    is_done: bool

    @classmethod
    def parse(cls, response: httpx.Response) -> "Streamed":
        """Strict: every event is one the format allows, in UTF-8."""
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.content.decode("utf-8")
        assert text.endswith("\n\n")
        chunks, errors, is_done = [], [], False
        for event in text.removesuffix("\n\n").split("\n\n"):
            assert not is_done, "something follows [DONE]"
            kind, _, data = event.rpartition("data: ")
            assert kind in ("", "event: error\n"), event
            if data == "[DONE]":
                is_done = True
            else:
                (errors if kind else chunks).append(json.loads(data))
        return cls(response, chunks, errors, is_done)

    def deltas(self, choice: int = 0) -> list[str]:
        """Texts of a choice's chunks."""
        entries = [entry for chunk in self.chunks for entry in chunk["choices"] if entry["index"] == choice]
        return [entry["text"] if "text" in entry else entry["delta"].get("content", "") for entry in entries]

    def text(self, choice: int = 0) -> str:
        return "".join(self.deltas(choice))

    def reasons(self, choice: int = 0) -> list[str]:
        """Every finish_reason that is not null."""
        entries = [entry for chunk in self.chunks for entry in chunk["choices"] if entry["index"] == choice]
        return [entry["finish_reason"] for entry in entries if entry["finish_reason"] is not None]


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
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
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

    def reply(self, text: str, *, ends: bool = True) -> None:
        """From now on every request samples the tokens of `text`, then (`ends`) the end token."""
        ids = self.tokenizer.encode(text).ids
        if ends:
            ids.append(self.end_token())
        self.worker.script = lambda _: ids

    def end_token(self) -> int:
        token = self.tokenizer.token_to_id("<|im_end|>")
        assert token is not None
        return token

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    def stream(self, route: str = "/v1/chat/completions", **fields: Any) -> "Streamed":
        """A whole stream, read to its end."""
        body: dict[str, Any] = {"model": MODEL, "stream": True}
        body |= {"prompt": "hi"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
        response = self.http.post(route, json=body | fields)
        assert response.status_code == 200, response.text
        return Streamed.parse(response)

    def openings(self) -> list[OpenRequest]:
        """What the worker was told of every request so far."""
        received = list(self.worker.received)
        return [message.open for message in received if isinstance(message, StartWalk) and message.open is not None]

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
