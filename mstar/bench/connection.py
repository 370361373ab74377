"""HTTP/1.1 connections of the load generator: one request at a time on each, kept alive in a pool.

Runs on the load generator's event loop. The client shares the machine with the server it measures, so a streamed event
costs a callback and no task switch: about 11 us with its JSON, where httpx takes 58 (32 streams, uvloop, two-core
machine). Does not follow redirects and knows no proxies.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

EventSink = Callable[[bytes, float], None]
"""Takes the payload of one `data:` line and the time (`time.perf_counter`, seconds) at which its bytes were read."""

OK = 200
UNAUTHORIZED = 401


class ConnectionClosed(Exception):
    """The server closed the connection before its response was complete. `untouched`: not one byte had come."""

    def __init__(self, untouched: bool) -> None:
        super().__init__("the connection was closed before the response was complete")
        self.untouched = untouched


class Response(NamedTuple):
    """`body` is empty for an event stream: its events went to the sink."""

    status: int
    body: bytes


class HttpConnection(asyncio.Protocol):
    """A protocol instance, reused for the requests of one connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Response] | None = None
        self._sink: EventSink | None = None
        self._streams = False
        self._body: list[bytes] = []
        self._rest = b""
        self._read_at = 0.0
        self._touched = False
        self.reusable = True

    def request(self, message: bytes, sink: EventSink) -> asyncio.Future[Response]:
        """Send a request; the future fails with `ConnectionClosed`."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._sink, self._streams, self._touched = sink, False, False
        self._body, self._rest = [], b""
        if self._transport.is_closing():
            self._done.set_exception(ConnectionClosed(untouched=True))
        else:
            self._transport.write(message)
        return self._done

    def abort(self) -> None:
        """Close at once; the server sees a client that went away."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's only behaves like one

    def data_received(self, data: bytes) -> None:
        self._read_at = time.perf_counter()
        self._touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionClosed(untouched=not self._touched))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._streams = value.startswith(b"text/event-stream")

    def on_body(self, chunk: bytes) -> None:
        if not self._streams:
            self._body.append(chunk)
            return
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        sink = self._sink
        assert sink is not None
        for line in lines:
            if line.startswith(b"data:"):
                sink(line[5:].strip(), self._read_at)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_result(Response(self._parser.get_status_code(), b"".join(self._body)))


class ConnectionPool:
    """Connections to one server. `url` is its root, with or without `/v1`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url if "://" in url else f"http://{url}"
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        shown = f"[{self._host}]" if ":" in self._host else self._host
        headers: Mapping[str, str] = {"Host": f"{shown}:{self._port}", "Accept": "application/json, text/event-stream"}
        if api_key is not None:
            headers = {**headers, "Authorization": f"Bearer {api_key}"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[HttpConnection] = []

    async def get(self, path: str) -> Response:
        """Raises `OSError` or `ConnectionClosed`."""
        return await self._send(self._message("GET", path, b""), lambda _payload, _at: None)

    async def post(self, path: str, body: bytes, sink: EventSink) -> Response:
        """Send JSON; events of a stream go to `sink`. A cancelled call closes its connection.

        Raises:
            OSError, ConnectionClosed: there is no (complete) response.
        """
        return await self._send(self._message("POST", path, body), sink)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + body

    async def _send(self, message: bytes, sink: EventSink) -> Response:
        while True:
            connection = self._take_idle()
            reused = connection is not None
            if connection is None:
                _, connection = await asyncio.get_running_loop().create_connection(
                    HttpConnection, self._host, self._port, ssl=self._ssl
                )
            try:
                response = await connection.request(message, sink)
            except ConnectionClosed as closed:
                # A server may end an idle connection at any time: such a request never reached it.
                if reused and closed.untouched:
                    continue
                raise
            except asyncio.CancelledError:
                connection.abort()
                raise
            if connection.reusable:
                self._idle.append(connection)
            return response

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None
