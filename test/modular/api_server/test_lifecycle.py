"""Clients that leave, workers that die, full queues and the end of the server: nothing is left behind."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_worker import endless
from support.running_front import MODEL, RunningFront, Streamed, build_spec
from support.tiny_text import build_tokenizer

from mstar.communication.messages import PeerLost, Remove
from mstar.config.schema import ServerConfig

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def raw_request(front: RunningFront, *, stream: bool, extra: bytes = b"", **fields: object) -> socket.socket:
    body = json.dumps(BODY | {"stream": stream} | fields).encode()
    host, port = front.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + extra
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_at_once(slow: RunningFront, stream: bool):
    connection = raw_request(slow, stream=stream)
    slow.wait_until(lambda: len(slow.worker.rows) == 1)
    if stream:
        assert connection.recv(100)
    (row,) = slow.worker.rows.values()
    connection.close()
    slow.wait_until(lambda: slow.worker.num_open == 0)
    assert isinstance(slow.worker.received[-1], Remove)
    sampled = row.num_sampled
    slow.wait_until(lambda: slow.parts.handle.num_live == 0)
    assert row.num_sampled == sampled, "no step after the request was removed"


def test_a_client_that_leaves_before_the_first_token(slow: RunningFront):
    slow.call(lambda: setattr(slow.worker, "is_paused", True))
    connection = raw_request(slow, stream=True)
    slow.wait_until(lambda: slow.worker.num_open == 1)
    assert slow.parts.handle.num_waiting == 1
    connection.close()
    slow.wait_until(lambda: slow.worker.num_open == 0)
    assert slow.parts.handle.num_waiting == 0


def test_a_client_that_leaves_does_not_wait_for_its_tokens(front: RunningFront, monkeypatch: pytest.MonkeyPatch):
    states: list[str] = []

    async def endless_work(*_: object) -> None:
        states.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            states.append("ended")

    monkeypatch.setattr(front.parts.pool, "prepare", endless_work)
    host, port = front.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
            b'{"prompt": "x"}'
        )
        front.wait_until(lambda: states == ["begun"])
    front.wait_until(lambda: states == ["begun", "ended"])


def test_many_clients_leave_at_any_moment(slow: RunningFront):
    """E1, this side."""
    connections = [raw_request(slow, stream=index % 3 != 0) for index in range(40)]
    for index, connection in enumerate(connections):
        if index % 2:
            connection.close()
    slow.wait_until(lambda: slow.worker.num_open == 20)
    for connection in connections:
        connection.close()
    slow.wait_until(lambda: slow.worker.num_open == 0)
    slow.wait_until(lambda: slow.parts.handle.num_live == 0)


def dechunked(data: bytes) -> bytes:
    """The body of a chunked response."""
    body, rest = b"", data.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def test_a_slow_reader_gets_everything(front: RunningFront):
    """Several megabytes are produced before the client reads the first byte: writing pauses, nothing is lost."""
    text = " The capital of France is Paris." * 20
    front.reply(text, ends=False)
    num_choices, num_tokens = 128, len(front.tokenizer.encode(text).ids)
    assert num_tokens > 150
    connection = raw_request(front, stream=True, extra=b"connection: close\r\n", n=num_choices, max_tokens=num_tokens)
    front.wait_until(lambda: front.worker.num_open > 0)
    front.wait_until(lambda: front.parts.handle.num_live == 0)
    data = b""
    while part := connection.recv(1 << 20):
        data += part
    assert len(data) > 3_000_000
    texts = [""] * num_choices
    events = dechunked(data).decode().removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    for event in events:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [text] * num_choices


def test_pipelined_requests_on_one_connection(front: RunningFront):
    connection = raw_request(front, stream=False)
    body = json.dumps(BODY | {"max_tokens": 1}).encode()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    data = b""
    while part := connection.recv(65536):
        data += part
    assert data.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("sends", ["together", "apart"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_with_pipelined_requests_that_leaves(
    slow: RunningFront, caplog: pytest.LogCaptureFixture, sends: str, stream: bool
):
    """All end, the one that runs and those that wait behind it; a waiting one may have a large body."""
    bodies = [json.dumps(BODY | {"stream": stream, "user": "x" * size}).encode() for size in (0, 0, 300_000)]
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    messages = [head % len(body) + body for body in bodies]
    host, port = slow.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for data in [b"".join(messages)] if sends == "together" else messages:
            connection.sendall(data)
            slow.wait_until(lambda: len(slow.worker.rows) == 1)
            time.sleep(0.1)
        assert slow.worker.num_open == 1
    slow.wait_until(lambda: slow.worker.num_open == 0)
    slow.wait_until(lambda: slow.parts.handle.num_live == 0)
    assert not slow.call(lambda: slow.server.server_state.tasks)
    assert "Traceback" not in caplog.text


class InBackground:
    """A request in a thread; `answer` waits for its end."""

    def __init__(self, front: RunningFront, **fields: object) -> None:
        self._front = front
        self._fields = fields
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._answer = self._front.http.post(CHAT, json=BODY | self._fields)

    def answer(self):
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self._answer


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RunningFront]:
    """A front that a test may break: short watchdog and timeouts, 2 rows and a queue of 2."""
    spec = build_spec(tmp_path)
    server = ServerConfig(watchdog_s=0.5, step_timeout_s=5, drain_timeout_s=1)
    with RunningFront(replace(spec, server=server, max_rows=2, max_queue=2), build_tokenizer(), endless) as front:
        front.call(lambda: setattr(front.worker, "step_s", 0.01))
        yield front


def test_a_dead_worker_and_its_restart(own: RunningFront):
    """E6: 503 before the first byte, an error event after it, red, then well again."""
    streaming = InBackground(own, stream=True)
    whole = InBackground(own)
    own.wait_until(lambda: len(own.worker.rows) == 2 and all(row.num_sampled > 3 for row in own.worker.rows.values()))
    before = time.monotonic()
    own.call(lambda: setattr(own.worker, "is_ended", True))
    own.call(lambda: own.parts.conductor.on_messages([PeerLost(0, 0, "killed by signal 9")]))
    answer = whole.answer()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "worker_lost"
    assert answer.headers["retry-after"] == "2"
    stream = Streamed.parse(streaming.answer())
    assert time.monotonic() - before < 2
    assert stream.text() and not stream.is_done and stream.reasons() == []
    assert [event["error"]["code"] for event in stream.errors] == ["worker_lost"]
    assert own.http.get("/health").status_code == own.http.get("/ready").status_code == 503
    assert "killed" not in own.http.get("/health").text and "worker 0 has ended" in own.http.get("/health").text
    assert own.http.get("/live").status_code == 200
    refused = own.chat(max_tokens=2)
    assert refused.status_code == 503 and "worker 0" in refused.json()["error"]["message"]
    own.worker = own.call(lambda: own.start_worker(incarnation=1))
    own.wait_until(lambda: own.http.get("/health").status_code == 200)
    assert own.chat(max_tokens=2).json()["choices"][0]["finish_reason"] == "length"
    assert "mstar_worker_restarts_total 1.0" in own.http.get("/metrics").text


def test_a_frozen_worker_turns_red_within_the_watchdog_time(own: RunningFront):
    """E6. A busy one stays green as long as it beats."""
    own.call(lambda: setattr(own.worker, "is_paused", True))
    pending = InBackground(own)
    own.wait_until(lambda: own.worker.num_open == 1)
    time.sleep(0.8)
    assert own.http.get("/health").status_code == 200, "a long step with heartbeats"
    own.call(lambda: setattr(own.worker, "is_silent", True))
    before = time.monotonic()
    answer = pending.answer()
    assert 0.3 < time.monotonic() - before < 1.5
    assert answer.status_code == 503 and "heartbeat" in answer.json()["error"]["message"]
    assert own.http.get("/health").status_code == 503
    own.call(lambda: setattr(own.worker, "is_silent", False))
    own.wait_until(lambda: own.http.get("/health").status_code == 200)
    own.call(own.worker.resume)
    own.wait_until(lambda: own.worker.num_open == 0)


def test_a_full_queue_is_429_with_retry_after(own: RunningFront):
    """As many as run and wait are taken on, however they arrive; those that are refused disturb nobody."""
    own.call(lambda: setattr(own.worker, "is_paused", True))
    waiting = [InBackground(own, max_tokens=2) for _ in range(4)]
    own.wait_until(lambda: own.worker.num_open == 4)
    for refused in (own.chat(max_tokens=2), own.complete(max_tokens=2), own.chat(max_tokens=2, stream=True)):
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full" and refused.json()["error"]["type"] == "rate_limit_error"
    assert own.worker.num_open == 4
    own.call(own.worker.resume)
    assert [pending.answer().status_code for pending in waiting] == [200] * 4
    assert own.chat(max_tokens=2).status_code == 200
    assert 'mstar_refused_requests_total{code="queue_full"} 3.0' in own.http.get("/metrics").text


def test_choices_count_one_by_one(own: RunningFront):
    """2 may run and 2 wait: 4 choices fit, 5 never do, and 2 not beside 3."""
    assert len(own.chat(n=4, max_tokens=2).json()["choices"]) == 4
    assert len(own.complete(["a", "b"], n=2, max_tokens=2).json()["choices"]) == 4
    for refused, field in ((own.chat(n=5, max_tokens=2), "n"), (own.complete(["a"] * 5, max_tokens=2), "prompt")):
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "too_many_choices", field)
        assert "5 choices" in error["message"] and "4" in error["message"]
    own.call(lambda: setattr(own.worker, "is_paused", True))
    waiting = InBackground(own, n=3, max_tokens=2)
    own.wait_until(lambda: own.worker.num_open == 3)
    assert own.chat(n=2, max_tokens=2).status_code == 429
    last = InBackground(own, max_tokens=2)
    own.wait_until(lambda: own.worker.num_open == 4)
    own.call(own.worker.resume)
    assert len(waiting.answer().json()["choices"]) == 3
    assert last.answer().status_code == 200


def test_running_requests_do_not_count_as_queue(own: RunningFront):
    """Two run and have shown something; two more may wait, whether their prompts are prepared or not."""
    headers = {"x-request-id": "running"}
    threads = []
    for count in range(1, 5):
        threads.append(threading.Thread(target=own.http.post, args=(CHAT,), kwargs={"json": BODY, "headers": headers}))
        threads[-1].start()
        own.wait_until(lambda count=count: len(own.worker.rows) == count and own.parts.handle.num_waiting == 0)
    assert own.chat(max_tokens=2).status_code == 429
    assert own.http.delete("/v1/requests/running").json()["aborted"] == 4
    for thread in threads:
        thread.join(10)
    assert own.chat(max_tokens=2).status_code == 200


def test_requests_whose_prompts_are_prepared_have_their_place(own: RunningFront, monkeypatch: pytest.MonkeyPatch):
    prepare, may_go = own.parts.pool.prepare, own.call(asyncio.Event)

    async def slow_prepare(*args: object):
        await may_go.wait()
        return await prepare(*args)

    monkeypatch.setattr(own.parts.pool, "prepare", slow_prepare)
    waiting = [InBackground(own, max_tokens=2) for _ in range(4)]
    own.wait_until(lambda: own.parts.handle.num_live == 4)
    assert own.worker.num_open == 0
    assert own.chat(max_tokens=2).status_code == 429
    own.call(may_go.set)
    assert [pending.answer().status_code for pending in waiting] == [200] * 4
    assert own.chat(max_tokens=2).status_code == 200


def test_requests_that_wait_for_room_are_bounded_too(own: RunningFront):
    """The worker has room for one only: the queue is full when it says so, and empty as soon as it has emitted."""
    own.call(lambda: setattr(own.worker, "is_paused", True))
    own.call(lambda: setattr(own.worker, "num_queued", 2))
    waiting = [InBackground(own, max_tokens=2) for _ in range(3)]
    own.wait_until(lambda: own.worker.num_open == 3)
    own.call(own.worker.beat)
    own.wait_until(lambda: own.parts.handle.worker_gauges()["mstar_queue_depth"] == 2)
    assert own.chat(max_tokens=2).status_code == 429
    own.call(own.worker.resume)
    assert [pending.answer().status_code for pending in waiting] == [200] * 3
    assert own.chat(max_tokens=2).status_code == 200, "an old report counts nobody who has emitted"


def test_draining_refuses_new_requests_and_lets_running_ones_finish(own: RunningFront):
    """E9, without the process."""
    own.reply(" The capital of France is Paris.")
    own.call(lambda: setattr(own.worker, "step_s", 0.03))
    running = InBackground(own, stream=True)
    own.wait_until(lambda: len(own.worker.rows) == 1)
    own.call(own.parts.handle.begin_drain)
    refused = own.chat()
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_shutting_down"
    assert own.http.get("/ready").status_code == 503
    assert own.http.get("/health").status_code == own.http.get("/live").status_code == 200
    stream = Streamed.parse(running.answer())
    assert stream.is_done and stream.text() == " The capital of France is Paris."


def test_before_a_worker_is_ready_nothing_is_taken_on(tmp_path: Path):
    with RunningFront(build_spec(tmp_path), build_tokenizer(), endless, with_worker=False) as front:
        for path in ("/ready", "/health"):
            answer = front.http.get(path)
            assert answer.status_code == 503 and answer.json() == {"status": "worker 0 is starting"}
        refused = front.chat()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
        front.worker = front.call(front.start_worker)
        front.wait_until(lambda: front.http.get("/ready").status_code == 200)
        assert front.chat(max_tokens=2).status_code == 200
