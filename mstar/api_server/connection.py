"""HTTP connections: uvicorn's protocol with a bound on their number and on the size of a head, and errors in our shape.

Front loop only. Above the bound a connection is answered 503 and closed, so that descriptors never run out: running out
would make accepting spin.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
from typing import Any, ClassVar

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mstar.api_server.errors import error_body
from mstar.conductor.events import Failure

BODY_WRITER = "mstar.body_writer"
"""ASGI extension of `FrontProtocol`: the response's `BodyWriter`."""
KEPT_DESCRIPTORS = 128
"""For everything that is not a client: sockets of this process, files, the preprocess pool."""
MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 16
MAX_PIPELINED_BYTES = 1 << 20
"""What may wait on a connection behind the request that runs while reading goes on: requests, and their bodies."""
MAX_REFUSED_WAITING = 32
REFUSED_WAIT_S = 2.0
TOO_MANY = Failure(503, "too_many_connections", "This server has too many connections. Try again later.")
HEAD_TOO_LARGE = Failure(431, "head_too_large", f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")
WRONG_VERSION = Failure(505, "http_version_not_supported", "This server speaks HTTP/1.1 and HTTP/1.0.")
INVALID = Failure(400, "invalid_http", "Invalid HTTP request received.")
NO_PROXY = Failure(400, "invalid_http", "This server is no proxy.")
REASONS = {
    400: b"Bad Request",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
    505: b"HTTP Version Not Supported",
}


def raise_descriptor_limit() -> int:
    """Raises the soft limit on open files to the hard one; returns how many connections fit under it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # the system has a lower ceiling than the hard limit says
            pass
    return max(1, soft - KEPT_DESCRIPTORS) if soft != resource.RLIM_INFINITY else 1 << 20


def raw_response(failure: Failure) -> bytes:
    """A whole HTTP/1.1 response that closes the connection."""
    body = error_body(failure)
    retry = b"" if failure.status != 503 else b"retry-after: 1\r\n"
    return (
        b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (failure.status, REASONS[failure.status])
        + b"content-length: %d\r\n" % len(body)
        + retry
        + b"x-request-id: req-%s\r\n" % secrets.token_hex(12).encode()
        + b"connection: close\r\n\r\n"
        + body
    )


class BodyWriter:
    """Writes a piece of a response's body at once, where `send` would have to be awaited by a task."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def can_write(self) -> bool:
        """False while the client reads too slowly, once it is gone, and for a response that is not chunked."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, body: bytes) -> None:
        """Only while `can_write`. `body` is not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class CloseDelimited:
    """Answers a request of HTTP/1.0, which does not know chunks: a body without a length ends with the connection."""

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = False

        async def send_plain(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    self._cycle.chunked_encoding = False
            elif not has_length:  # what the server checks bodies against: each is as long as was announced
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plain)


class FrontProtocol(HttpToolsProtocol):
    """`max_connections` holds for the process, as do the counts `num_open` and `num_refused`. A refused connection
    is answered when its request begins, so that the answer is not lost behind data that nobody reads; a few may
    wait for that, for a short time.

    Every request of a connection learns that the client has left, the one that runs as well as those that wait behind
    it, so the connection is read while they do."""

    max_connections: ClassVar[int] = 1 << 20
    refused_waiting: ClassVar[int] = 0
    num_open: ClassVar[int] = 0
    num_refused: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._is_finished = False
        self._running: RequestResponseCycle | None = None
        self._is_counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > FrontProtocol.max_connections:
            self.connections.discard(self)
            FrontProtocol.num_refused += 1
            if FrontProtocol.refused_waiting >= MAX_REFUSED_WAITING:
                self._answer_and_close(TOO_MANY)
                return
            FrontProtocol.refused_waiting += 1
            self._refusal_timer = self.loop.call_later(REFUSED_WAIT_S, self._answer_and_close, TOO_MANY)
            return
        self._is_counted = True
        FrontProtocol.num_open += 1

    def data_received(self, data: bytes) -> None:
        if self._refusal_timer is not None:
            self._answer_and_close(TOO_MANY)
        elif not self.transport.is_closing():
            self._is_finished = False
            self._read(data)
            self._unfinished_bytes = 0 if self._is_finished else self._unfinished_bytes + len(data)
            if self._unfinished_bytes > MAX_HEAD_BYTES:
                self._answer_and_close(HEAD_TOO_LARGE)

    def _read(self, data: bytes) -> None:
        """The parser stops behind the head of a request that offers another protocol, as if it had no body and were the
        last one. Its head is read again without the offer, which a server may ignore (RFC 9110, 7.8)."""
        self._unset_keepalive_if_required()
        pieces: list[bytes | memoryview] = [data]
        while pieces and not self.transport.is_closing():
            piece = pieces.pop()
            assert self.parser is not None
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    self._answer_and_close(NO_PROXY)
                    return
                pieces += (memoryview(piece)[offer.args[0] :], self._head_without_offer())
                self.parser = httptools.HttpRequestParser(self)  # the old one may expect nothing any more
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base class does
            except httptools.HttpParserError:
                self.logger.warning(INVALID.message)
                self._answer_and_close(INVALID)

    def _head_without_offer(self) -> bytes:
        """Of the request whose head was read last."""
        assert self.parser is not None
        version = self.parser.get_http_version().encode()
        fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, fields)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_refusal()
        FrontProtocol.num_open -= self._is_counted
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (*waiting, *(() if self._running is None else (self._running,))):
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._is_finished = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._fits(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._fits(len(name) + len(value)):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_finished = True
        assert self.parser is not None
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._answer_and_close(WRONG_VERSION)
        if not self.transport.is_closing() and not self.parser.should_upgrade():
            super().on_headers_complete()
            self._read_on()
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})  # type: ignore[assignment]
            extensions[BODY_WRITER] = BodyWriter(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._is_finished = True
        if not self.transport.is_closing():
            super().on_body(body)
            self._read_on()

    def on_message_complete(self) -> None:
        self._is_finished = True
        assert self.parser is not None
        if not self.transport.is_closing() and not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, CloseDelimited(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _read_on(self) -> None:
        """The base stops reading for a request that has to wait; nobody would see then that the client leaves."""
        if self.pipeline and len(self.pipeline) <= MAX_PIPELINED:
            if sum(len(cycle.body) for cycle, _ in self.pipeline) <= MAX_PIPELINED_BYTES:
                self.flow.resume_reading()

    def _fits(self, num_bytes: int) -> bool:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._answer_and_close(HEAD_TOO_LARGE)
        return self._head_bytes <= MAX_HEAD_BYTES

    def _answer_and_close(self, failure: Failure) -> None:
        self._end_refusal()
        if not self.transport.is_closing():
            self.transport.write(raw_response(failure))
            self.transport.close()

    def _end_refusal(self) -> None:
        if self._refusal_timer is not None:
            self._refusal_timer.cancel()
            self._refusal_timer = None
            FrontProtocol.refused_waiting -= 1
