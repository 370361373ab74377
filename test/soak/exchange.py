"""HTTP for the soak's clients: one request and its answer over a socket, with every way of leaving it.

`mstar.bench` has a client too; this one knows nothing of the product and lets a test close, reset or cut a request.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    """`events`: payloads of a stream, parsed, without the last one's `[DONE]`, which sets `is_done`. `body` of another
    answer, parsed."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    body: Any = None


class CutOffError(Exception):
    """The server closed the connection before its answer was complete."""


class Exchange:
    """One connection for one request. `reply`: what has come of its answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._writer: asyncio.StreamWriter | None = None
        self.reply = Reply()

    async def send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        request_id: str = "",
        on_event: Callable[[], None] = lambda: None,
        half: bool = False,
    ) -> Reply:
        """The answer, once it is complete. `half`: only the first half of the request is sent.

        Raises:
            OSError, CutOffError: there is no complete answer.
        """
        payload = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n"
        if request_id:
            head += f"x-request-id: {request_id}\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        message = f"{head}\r\n".encode() + payload
        reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        try:
            self._writer.write(message[: len(message) // 2] if half else message)
            return await self._read(reader, on_event)
        finally:
            self._writer.close()

    def leave(self, *, reset: bool) -> None:
        """Close the connection, or reset it: with that, what was on its way is lost."""
        if self._writer is None or self._writer.is_closing():
            return
        connection: socket.socket | None = self._writer.get_extra_info("socket")
        if reset and connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, on_event: Callable[[], None]) -> Reply:
        reply = self.reply
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            reply.status = int(lines[0].split()[1])
            for line in lines[1:]:
                name, _, value = line.partition(":")
                reply.headers[name.strip().lower()] = value.strip()
            if reply.headers.get("content-type", "").startswith("text/event-stream"):
                await self._read_events(reader, reply, on_event)
            elif "content-length" in reply.headers:
                text = await reader.readexactly(int(reply.headers["content-length"]))
                is_json = reply.headers.get("content-type", "").startswith("application/json")
                reply.body = json.loads(text) if is_json else text.decode()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CutOffError(f"after {reply.status} and {len(reply.events)} events") from error
        return reply

    async def _read_events(self, reader: asyncio.StreamReader, reply: Reply, on_event: Callable[[], None]) -> None:
        rest = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            data = rest + (await reader.readexactly(size + 2))[:-2]
            *lines, rest = data.split(b"\n")
            for line in lines:
                if line == b"data: [DONE]":
                    reply.is_done = True
                elif line.startswith(b"data: "):
                    reply.events.append(json.loads(line[6:]))
                    on_event()
        await reader.readexactly(2)
