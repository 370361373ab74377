"""A server that answers like OpenAI's API, token by token, with delays that are known: what a load generator is tested
against. Its event loop runs on a thread of its own; it keeps a log of what it was asked and when it sent what."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

TEMPLATE_TOKENS = 7
IMAGE_TOKENS = 16


@dataclass
class Answer:
    """`delays_s[i]` passes before token i is sent (the last one again for further tokens). `status` other than 200: an
    error. `cut_after` tokens the connection is closed; `error_after` tokens an error event ends the stream. `coalesce`
    tokens go out in one chunk of the stream. `cached_tokens`: of the prompt, in the usage. `silent`: tokens are no
    text."""

    delays_s: tuple[float, ...] = (0.0,)
    status: int = 200
    cut_after: int | None = None
    error_after: int | None = None
    coalesce: int = 1
    counts_usage: bool = True
    keeps_alive: bool = True
    cached_tokens: int | None = None
    silent: bool = False


@dataclass
class Served:
    """One request, as the server saw it. Times: `time.perf_counter`, the same clock in all threads."""

    path: str
    body: dict
    connection: int
    received_s: float
    sent_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0


@dataclass
class Stub:
    url: str
    served: list[Served]

    def full(self) -> list[Served]:
        """The load's requests, without probes (of one token)."""
        return [one for one in self.served if one.body.get("max_tokens", 0) > 1]


@contextmanager
def openai_stub(
    answer: Callable[[int, dict], Answer] | None = None,
    refuse_usage: bool = False,
    refuse_images: bool = False,
    silent_probes: bool = False,
) -> Iterator[Stub]:
    """`answer(i, body)` says how request i (probes not counted) is answered. `silent_probes`: theirs is no text."""
    script = answer or (lambda index, body: Answer())
    loop = asyncio.new_event_loop()
    stub = Stub("", [])
    connections = iter(range(10_000))
    writers: set[asyncio.StreamWriter] = set()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(connections)
        writers.add(writer)
        try:
            while await _serve_one(reader, writer, stub, number, script, refuse_usage, refuse_images, silent_probes):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writers.discard(writer)
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(client, "127.0.0.1", 0))
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end() -> None:
        server.close()
        for writer in list(writers):
            writer.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield stub
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve_one(
    reader, writer, stub: Stub, connection: int, script, refuse_usage: bool, refuse_images: bool, silent_probes: bool
) -> bool:
    """Answer one request; whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, path, _ = head.split("\r\n")[0].split(" ")
    lengths = [line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
    raw = await reader.readexactly(int(lengths[0])) if lengths else b""
    if method == "GET" and path == "/v1/models":
        _write_json(writer, 200, {"object": "list", "data": [{"id": "stub-model", "object": "model"}]})
        return True
    body = json.loads(raw)
    index = len(stub.full())
    served = Served(path, body, connection, time.perf_counter())
    stub.served.append(served)
    if refuse_usage and "stream_options" in body:
        _write_json(writer, 400, {"error": {"message": "unknown field stream_options", "param": "stream_options"}})
        return True
    if refuse_images and images_of(body):
        _write_json(writer, 400, {"error": {"message": "this model reads text only"}})
        return True
    probe = Answer(counts_usage=not refuse_usage, silent=silent_probes)
    answer = probe if body["max_tokens"] == 1 else script(index, body)
    if answer.status != 200:
        _write_json(writer, answer.status, {"error": {"message": "queue full"}})
        return True
    return await _stream(writer, served, answer)


async def _stream(writer, served: Served, answer: Answer) -> bool:
    body = served.body
    chat = served.path.endswith("/chat/completions")
    connection = "keep-alive" if answer.keeps_alive else "close"
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
        + f"Connection: {connection}\r\n\r\n".encode()
    )
    if chat:
        _write_event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    held: list[str] = []
    for token in range(body["max_tokens"]):
        await asyncio.sleep(answer.delays_s[min(token, len(answer.delays_s) - 1)])
        if token == answer.cut_after:
            writer.transport.abort()
            return False
        if token == answer.error_after:
            _write_event(writer, {"error": {"message": "worker lost", "code": 503}})
            writer.write(b"0\r\n\r\n")
            return True
        held.append(f" t{token}")
        if len(held) == answer.coalesce or token == body["max_tokens"] - 1:
            served.sent_s.append(time.perf_counter())
            text = "" if answer.silent else "".join(held)
            _write_event(writer, {"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            held = []
    _write_event(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
    if answer.counts_usage and body.get("stream_options", {}).get("include_usage"):
        usage = {"prompt_tokens": _prompt_tokens(body), "completion_tokens": body["max_tokens"]}
        if answer.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
        _write_event(writer, {"choices": [], "usage": usage})
    served.ended_s = time.perf_counter()
    _write_chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return answer.keeps_alive


def _prompt_tokens(body: dict) -> int:
    if "prompt" in body:
        return len(body["prompt"].split())
    return TEMPLATE_TOKENS + len(text_of(body).split()) + IMAGE_TOKENS * len(images_of(body))


def text_of(body: dict) -> str:
    """All text of a chat."""
    return " ".join(part["text"] for part in _parts(body) if part["type"] == "text")


def images_of(body: dict) -> list[str]:
    """URLs of a chat's images, in order."""
    return [part["image_url"]["url"] for part in _parts(body) if part["type"] == "image_url"]


def _parts(body: dict) -> list[dict]:
    contents = [turn["content"] for turn in body.get("messages", ())]
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def _write_json(writer, status: int, content: dict) -> None:
    raw = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)


def _write_event(writer, content: dict) -> None:
    _write_chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _write_chunk(writer, raw: bytes) -> None:
    writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
