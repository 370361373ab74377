"""A client that reads a stream in a thread of its own, for tests that do something to the server meanwhile."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import httpx


class Streamed:
    """A completion streamed to a thread: its lines, and when the last one came. `asked`: the request's body."""

    def __init__(self, url: str, asked: dict) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.ended_at = 0.0
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, asked | {"stream": True}), daemon=True)
        self._thread.start()

    def wait_for_text(self) -> None:
        assert self._first.wait(20), f"no text: {self.status} {self.lines}"

    def join(self, timeout_s: float = 60) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still open after {timeout_s} s: {self.lines[-3:]}"

    def _read(self, url: str, asked: dict) -> None:
        killed = contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError)
        with (
            killed,
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{url}/v1/completions", json=asked) as got,
        ):
            self.status = got.status_code
            for line in got.iter_lines():
                if line:
                    self.lines.append(line)
                if '"text":"' in line:
                    self._first.set()
        self.ended_at = time.monotonic()

    @property
    def error(self) -> dict | None:
        for line in self.lines:
            if line.startswith("data: {") and "error" in (event := json.loads(line.removeprefix("data: "))):
                return event["error"]
        return None
