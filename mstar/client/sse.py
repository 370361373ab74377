"""Server-sent events out of bytes. Pure.

Lines end at a line feed and nothing else: text in a JSON string may have other characters that some splitters take for
the end of a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

DONE = b"[DONE]"
"""Data of the last event of a stream that is complete."""


class ServerEvent(NamedTuple):
    """`name` is empty where the stream gives none."""

    name: str
    data: bytes


class EventSplitter:
    """Takes pieces of a body as they come, and gives the events that they complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        *blocks, self._rest = (self._rest + piece).split(b"\n\n")
        for block in blocks:
            name, data = "", []
            for line in block.split(b"\n"):
                field, _, value = line.partition(b":")
                value = value.removeprefix(b" ")
                if field == b"data":
                    data.append(value)
                elif field == b"event":
                    name = value.decode()
            if data:
                yield ServerEvent(name, b"\n".join(data))
