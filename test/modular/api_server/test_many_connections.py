"""A front with 1,024 file descriptors and more clients than that, and one whose clients read slowly or not at all."""

import contextlib
import json
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.front_child import FrontChild
from support.running_front import MODEL
from support.tiny_text import build_tokenizer

from mstar.communication.messages import SamplingParams, TokenLogprobs

OPEN_FILES = 1024
ROOM = OPEN_FILES - 128
IDLE, ACTIVE = 1000, 200
PATH = "/v1/completions"
REPLY = " The capital of France is Paris."


def reply(_: object) -> list[int]:
    tokenizer = build_tokenizer()
    return [*tokenizer.encode(REPLY).ids, tokenizer.token_to_id("<|im_end|>")]


def request(body: dict) -> bytes:
    data = json.dumps({"model": MODEL, "prompt": [5, 6, 7], **body}).encode()
    return (
        b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n" % PATH.encode()
        + b"content-length: %d\r\n\r\n" % len(data)
        + data
    )


class Answer(NamedTuple):
    status: int
    code: str


def answers_on(connections: Sequence[socket.socket], timeout_s: float = 60) -> Iterator[Answer]:
    """What is read on each until the server closes it. A connection that is reset without an answer has status 0."""
    with selectors.DefaultSelector() as ready:
        for connection in connections:
            connection.setblocking(False)
            ready.register(connection, selectors.EVENT_READ, bytearray())
        deadline = time.monotonic() + timeout_s
        while ready.get_map():
            events = ready.select(max(0.0, deadline - time.monotonic()))
            assert events, f"{len(ready.get_map())} connections without an answer"
            for key, _ in events:
                assert isinstance(key.fileobj, socket.socket)
                try:
                    part = key.fileobj.recv(65536)
                except ConnectionResetError:
                    part = b""
                key.data.extend(part)
                if not part:
                    ready.unregister(key.fileobj)
                    head, _, rest = bytes(key.data).partition(b"\r\n\r\n")
                    status = int(head.split()[1]) if head else 0
                    yield Answer(status, json.loads(rest)["error"]["code"] if status >= 400 else "")


@pytest.fixture(autouse=True)
def _descriptors_for_clients() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        if hard != resource.RLIM_INFINITY and hard < 4096:
            pytest.skip("this machine does not give a test 4096 descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    """Closed behind the test."""
    sockets: list[socket.socket] = []
    yield sockets
    for connection in sockets:
        connection.close()


def test_idle_and_active_clients_above_the_limit(tmp_path: Path, opened: list[socket.socket]):
    """1,000 idle and 200 active: those that fit are served, the others are told so, and nothing spins or crashes."""
    with FrontChild(tmp_path, reply, open_files=OPEN_FILES) as front:
        front.http.close()
        address = ("127.0.0.1", front.port)

        def connect(count: int) -> list[socket.socket]:
            made = [socket.create_connection(address, timeout=30) for _ in range(count)]
            opened.extend(made)
            return made

        idle = connect(ROOM - ACTIVE)
        for body in ({"max_tokens": 4}, {"stream": True}):
            active = connect(ACTIVE)
            for connection in active:
                connection.sendall(request(body))
            assert Counter(answers_on(active)) == {Answer(200, ""): ACTIVE}, "there is room for all of them"
        front.wait_until(lambda: front.worker.num_open == 0)

        more = connect(IDLE - len(idle))
        refused = more[ACTIVE:]
        assert Counter(answers_on(refused)) == {Answer(503, "too_many_connections"): IDLE - ROOM}
        active = connect(ACTIVE)
        for connection in active:
            with contextlib.suppress(OSError):  # it was answered and closed before it could ask
                connection.sendall(request({}))
        told = Counter(answers_on(active))
        assert told.keys() <= {Answer(503, "too_many_connections"), Answer(0, "")}, told
        assert told[Answer(0, "")] <= ACTIVE // 2, "most hear why, though they were still sending"
        assert front.process.poll() is None
        before = front.cpu_s()
        time.sleep(1)
        assert front.cpu_s() - before <= 0.05, f"{ROOM} idle connections cost nothing"

        for connection in idle:
            connection.close()
        front.http = httpx.Client(base_url=f"http://127.0.0.1:{front.port}", timeout=30)
        front.wait_until(lambda: front.http.get("/live").status_code == 200)
        assert front.http.post(PATH, json={"model": MODEL, "prompt": [5]}).status_code == 200
        assert sample(front, "mstar_refused_connections_total") >= IDLE - ROOM
        assert "Traceback" not in front.log()


def sample(front: FrontChild, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(front.http.get("/metrics").text)
    return sum(s.value for family in families for s in family.samples if s.name == name and s.labels == labels)


READERS = 64
WORDY = {"stream": True, "n": 3, "logprobs": 20, "max_tokens": 200}
"""More than the buffers of a connection hold."""


def num_ended(front: FrontChild) -> int:
    """Responses that have been handed to the kernel whole, by their lines in the log."""
    return front.log().count(f"POST {PATH}: 200")


def likely(token: int, _: SamplingParams) -> TokenLogprobs:
    return TokenLogprobs(-1.5, tuple(range(300, 320)), (-2.25,) * 20)


def test_slow_readers_cost_no_time(tmp_path: Path, opened: list[socket.socket]):
    """Clients that do not read, then read a little at a time: the front waits for them and serves others meanwhile."""
    with FrontChild(tmp_path, lambda _: iter(lambda: 300, None), send_bytes=16384) as front:
        front.call(lambda: setattr(front.worker, "logprobs", likely))
        front.call(lambda: setattr(front.worker, "step_s", 0.01))
        for _ in range(READERS):
            connection = socket.socket()
            opened.append(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", front.port))
            connection.sendall(request(WORDY))
        front.wait_until(
            lambda: sample(front, "mstar_requests_total", outcome="length") == READERS * WORDY["n"], timeout_s=60
        )
        before = front.cpu_s()
        time.sleep(1)
        assert front.cpu_s() - before <= 0.05, "whoever does not read is waited for"
        assert num_ended(front) < READERS / 4, "and has not been sent everything"
        began = time.monotonic()
        assert front.http.post(PATH, json={"model": MODEL, "prompt": [5], "max_tokens": 3}).status_code == 200
        assert time.monotonic() - began < 5

        before, num_read = front.cpu_s(), 0
        for _ in range(20):
            for connection in opened:
                num_read += len(connection.recv(512))
            time.sleep(0.05)
        assert num_read > READERS * 20 * 400
        assert front.cpu_s() - before < 0.5, "what is read slowly is written slowly"

        first, *rest = opened
        for connection in rest:
            connection.close()
        data = bytearray()
        first.settimeout(30)
        while part := first.recv(1 << 16):
            data += part
        assert num_ended(front) == READERS + 1
        front.wait_until(lambda: sample(front, "mstar_live_requests") == 0)
        assert data.endswith(b"0\r\n\r\n"), "the stream is whole"
        assert "Traceback" not in front.log()
