"""A real `mstar serve` beside a harness, in processes of its own, and a client that asks it one thing at a time."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

READY = re.compile(r"mstar is ready: \S+ at (http://\S+)")
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 40
ANSWER_TIMEOUT_S = 120
ROOT = Path(__file__).parents[1]


class Answer(NamedTuple):
    """`text` without what was thought. `ttft_s`: from sending the request to the first piece of either; `seconds`: to
    the end of the stream."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    seconds: float


class LocalServer:
    """One connection, kept alive; not for several threads. `pid`: of the process that started the others."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_TIMEOUT_S)
        self._connection.request("GET", "/v1/models")
        self._model = json.loads(self._connection.getresponse().read())["data"][0]["id"]

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, **fields: Any) -> Answer:
        """Stream one greedy answer of exactly `max_tokens` tokens.

        Raises:
            RuntimeError: the server refused it or failed.
        """
        return self._stream("/v1/chat/completions", {"messages": list(messages), "max_tokens": max_tokens, **fields})

    def complete(self, token_ids: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
        """The same of a prompt that is tokens already."""
        return self._stream("/v1/completions", {"prompt": list(token_ids), "max_tokens": max_tokens, **fields})

    def _stream(self, path: str, fields: Mapping[str, Any]) -> Answer:
        body = {
            "model": self._model,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        begin = time.perf_counter()
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"HTTP {response.status}: {response.read().decode()}")
        pieces: list[str] = []
        first = 0.0
        usage: Mapping[str, Any] | None = None
        for line in response:
            payload = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or payload == b"[DONE]":
                continue
            event = json.loads(payload)
            if "error" in event:
                raise RuntimeError(f"the stream ended with an error: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                delta = choice.get("delta", choice)
                text = delta.get("content") or delta.get("text")
                if text or delta.get("reasoning_content"):
                    first = first or time.perf_counter()
                if text:
                    pieces.append(text)
        end = time.perf_counter()
        if usage is None:
            raise RuntimeError("the stream ended without usage")
        return Answer(
            "".join(pieces),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            (first or end) - begin,
            end - begin,
        )

    def metrics(self) -> dict[str, float]:
        """Samples of `/metrics`, by name with labels. Gauges of a worker are up to a heartbeat old."""
        self._connection.request("GET", "/metrics")
        samples: dict[str, float] = {}
        for line in self._connection.getresponse().read().decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples

    def close(self) -> None:
        self._connection.close()


@contextmanager
def serving(
    target: str, overrides: Sequence[str] = (), *, start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[LocalServer]:
    """`mstar serve TARGET` on a free port until the block ends.

    Raises:
        RuntimeError: it is not ready in time; with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="mstar-bench-") as directory:
        log = Path(directory) / "server.log"
        command = [sys.executable, "-m", "mstar.cli", "serve", target, "--host", "127.0.0.1", "--port", "0"]
        for override in overrides:
            command += ["--set", override]
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, cwd=ROOT)
        try:
            server = LocalServer(_wait_ready(process, log, start_timeout_s), process.pid)
            yield server
            server.close()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while (match := READY.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server is not ready:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
    return match[1]
