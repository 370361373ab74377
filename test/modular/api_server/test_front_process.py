"""The front as a process: start, drain, signals, descriptors, idleness, and what is on the raw socket."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.fake_worker import endless
from support.front_child import FrontChild
from support.running_front import MODEL, Streamed
from support.tiny_text import build_tokenizer

from mstar.communication.messages import Hello, Ready

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
REPLY = " The capital of France is Paris."
CHAT = "/v1/chat/completions"


def reply(_: object) -> list[int]:
    tokenizer = build_tokenizer()
    return [*tokenizer.encode(REPLY).ids, tokenizer.token_to_id("<|im_end|>")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_start_up_is_reported_when_everything_answers(tmp_path: Path):
    with FrontChild(tmp_path, reply, with_worker=False) as front:
        front.wait_until(lambda: front.http.get("/live").status_code == 200, timeout_s=30)
        assert front.http.get("/ready").json() == {"status": "worker 0 is starting"}
        (hello,) = front.supervisor.receive()
        assert isinstance(hello, Hello) and (hello.rank, hello.pid) == (-1, front.process.pid)
        assert not front.supervisor.wait(0.2)
        front.start_worker()
        try:
            assert front.supervisor.wait(20)
            (ready,) = front.supervisor.receive()
            assert isinstance(ready, Ready) and ready.rank == -1
            assert front.http.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == REPLY
            libraries = Path(f"/proc/{front.process.pid}/maps").read_text()
            assert "torch" not in libraries and "tokenizers" in libraries
        finally:
            front.call(lambda: front.worker.bus.close())


@pytest.mark.parametrize("how", ["signal", "message"])
def test_the_end_in_order(tmp_path: Path, how: str):
    """E9: the running request finishes, a new one is refused on the same open port, exit 0, no process left."""
    with FrontChild(tmp_path, reply) as front:
        front.call(lambda: setattr(front.worker, "step_s", 0.05))
        results: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: results.append(front.http.post(CHAT, json=BODY | {"stream": True})))
        thread.start()
        front.wait_until(lambda: len(front.worker.rows) == 1)
        pool = front.children()
        assert pool
        before = time.monotonic()
        front.process.send_signal(signal.SIGTERM) if how == "signal" else front.shut_down()
        front.wait_until(lambda: front.http.get("/ready").status_code == 503)
        refused = httpx.post(f"http://127.0.0.1:{front.port}{CHAT}", json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_shutting_down"
        thread.join(20)
        stream = Streamed.parse(results[0])
        assert stream.is_done and stream.text() == REPLY
        assert front.process.wait(10) == 0
        assert time.monotonic() - before < 10
        assert not any(map(is_running, pool))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{front.port}/live")


def test_a_drain_ends_after_its_time(tmp_path: Path):
    with FrontChild(tmp_path, endless, drain_timeout_s=0.5) as front:
        front.call(lambda: setattr(front.worker, "step_s", 0.05))
        results: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: results.append(front.http.post(CHAT, json=BODY | {"stream": True})))
        thread.start()
        front.wait_until(lambda: any(row.num_sampled > 2 for row in front.worker.rows.values()))
        front.shut_down()
        thread.join(20)
        stream = Streamed.parse(results[0])
        assert not stream.is_done and stream.errors[0]["error"]["code"] == "server_shutting_down"
        assert front.process.wait(10) == 0


def test_signals(tmp_path: Path):
    """SIGINT is the supervisor's; a second SIGTERM does not wait, and takes the preprocess processes along."""
    with FrontChild(tmp_path, endless) as front:
        front.call(lambda: setattr(front.worker, "step_s", 0.05))
        ended: list[httpx.TransportError] = []

        def ask() -> None:
            try:
                front.http.post(CHAT, json=BODY)
            except httpx.TransportError as error:
                ended.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        front.wait_until(lambda: len(front.worker.rows) == 1)
        front.process.send_signal(signal.SIGINT)
        assert front.http.get("/ready").status_code == 200
        pool = front.children()
        front.process.send_signal(signal.SIGTERM)
        front.wait_until(lambda: front.http.get("/ready").status_code == 503)
        front.process.send_signal(signal.SIGTERM)
        assert front.process.wait(5) == 1
        thread.join(10)
        assert len(ended) == 1
        front.wait_until(lambda: not any(map(is_running, pool)))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontChild]:
    """For tests that leave the process as it was."""
    with FrontChild(tmp_path_factory.mktemp("front"), reply) as front:
        yield front


def test_an_idle_front_rests(healthy: FrontChild):
    assert healthy.http.post(CHAT, json=BODY).status_code == 200
    used = []
    for _ in range(3):  # the first may begin with what the request left to do
        before = healthy.cpu_s()
        time.sleep(2)
        used.append(healthy.cpu_s() - before)
        if used[-1] <= 0.02:  # 1 % of a core, and the clock ticks every 10 ms
            return
    raise AssertionError(f"seconds of CPU in two seconds each: {used}")


GET = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"


def is_answered(connection: socket.socket) -> bool:
    """One request on a connection that stays open."""
    connection.sendall(GET)
    data = b""
    while not data.endswith(b'{"status":"alive"}'):
        data += connection.recv(4096)
    return data.startswith(b"HTTP/1.1 200")


def answer_on(connection: socket.socket) -> tuple[int, dict]:
    """Status and JSON of a response that closes the connection."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"application/json" in head and b"\r\nx-request-id: req-" in head and b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)


def test_more_connections_than_descriptors(tmp_path: Path):
    """At most the limit less 128, from a soft limit that is lower still; those above are answered and closed."""
    room = 20
    with FrontChild(tmp_path, reply, open_files=128 + room) as front:
        front.http.close()
        address = ("127.0.0.1", front.port)
        held = [socket.create_connection(address, timeout=10) for _ in range(room)]
        assert all(map(is_answered, held))
        for _ in range(3):
            with socket.create_connection(address, timeout=10) as refused:
                refused.sendall(GET)
                status, body = answer_on(refused)
                assert status == 503 and body["error"]["code"] == "too_many_connections"
        silent = [socket.create_connection(address, timeout=10) for _ in range(60)]
        before = front.cpu_s()
        assert [answer_on(connection)[0] for connection in silent] == [503] * 60
        assert front.cpu_s() - before < 0.5, "nothing spins while connections are refused"
        for connection in silent:
            connection.close()
        assert all(map(is_answered, held))
        for connection in held:
            connection.close()
        front.http = httpx.Client(base_url=f"http://127.0.0.1:{front.port}", timeout=30)
        front.wait_until(lambda: front.http.get("/live").status_code == 200)
        assert front.http.post(CHAT, json=BODY).status_code == 200


def test_what_is_no_http_request_is_answered_in_shape(healthy: FrontChild):
    for data, status in (
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (b"POST /live HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", 400),
        (b"GET /live HTTP/2.0\r\nhost: x\r\n\r\n", 505),
        (b"GET /live HTTP/0.9\r\nhost: x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ):
        with socket.create_connection(("127.0.0.1", healthy.port), timeout=10) as connection:
            connection.sendall(data)
            got, body = answer_on(connection)
            assert got == status and set(body["error"]) == {"message", "type", "param", "code"}
    assert healthy.http.get("/live", headers={"x-long": "a" * 60_000}).status_code == 200


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /live HTTP/1.1\r\nhost: x\r\nx-long: ",
        b"GET /",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-trailer: ",
    ],
)
def test_a_line_without_an_end_is_not_collected(healthy: FrontChild, begin: bytes):
    def resident_bytes() -> int:
        return int(Path(f"/proc/{healthy.process.pid}/statm").read_text().split()[1]) * 4096

    resident, cpu_s = resident_bytes(), healthy.cpu_s()
    num_sent = 0
    with socket.create_connection(("127.0.0.1", healthy.port), timeout=10) as connection:
        connection.sendall(begin)
        try:
            while num_sent < 40_000_000:
                num_sent += connection.send(b"a" * 65536)
        except OSError:
            pass
    assert num_sent < 40_000_000, "the connection was closed"
    assert resident_bytes() - resident < 8_000_000
    assert healthy.cpu_s() - cpu_s < 0.5
    assert healthy.http.get("/live").status_code == 200


def test_a_line_without_an_end_is_answered(healthy: FrontChild):
    with socket.create_connection(("127.0.0.1", healthy.port), timeout=10) as connection:
        for data in (b"GET /live HTTP/1.1\r\nx-long: a", b"a" * 40_000, b"a" * 40_000):
            connection.sendall(data)
            time.sleep(0.1)
        assert answer_on(connection)[0] == 431


def test_a_stream_over_http_1_0_ends_with_the_connection(healthy: FrontChild):
    body = json.dumps(BODY | {"stream": True}).encode()
    for version, is_chunked in ((b"1.0", False), (b"1.1", True)):
        with socket.create_connection(("127.0.0.1", healthy.port), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/%b\r\nhost: x\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (version, len(body)) + body
            )
            data = b""
            while part := connection.recv(65536):
                data += part
        head, _, rest = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and (b"chunked" in head) == is_chunked
        if not is_chunked:
            assert b"content-length" not in head.lower()
            stream = Streamed.parse(httpx.Response(200, headers={"content-type": "text/event-stream"}, content=rest))
            assert stream.is_done and stream.text() == REPLY
    with socket.create_connection(("127.0.0.1", healthy.port), timeout=10) as connection:
        connection.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.endswith(b'{"status":"alive"}') and b"content-length: 18" in data


def test_the_log_has_no_raw_control_characters(healthy: FrontChild):
    """E25, in the process's own log."""
    evil = "a\r\n2030-01-01 00:00:00 ERROR forged\x1b[31m\x00"
    assert healthy.http.post(CHAT, json=BODY | {"model": evil}).status_code == 404
    assert healthy.http.get("/%1b%5b31m%0d%0aforged").status_code == 404
    healthy.wait_until(lambda: "forged" in healthy.log())
    assert not any(ord(c) < 0x20 and c != "\n" for c in healthy.log())
    assert not any(line.startswith(("2030", "forged")) for line in healthy.log().splitlines())


def test_each_request_has_a_line_in_the_log(tmp_path: Path):
    with FrontChild(tmp_path, reply, log_format="json") as front:
        assert front.http.post(CHAT, json=BODY | {"n": 2}, headers={"x-request-id": "mine"}).status_code == 200
        assert front.http.post(CHAT, json=BODY | {"model": "no"}, headers={"x-request-id": "wrong"}).status_code == 404
        with front.http.stream("POST", CHAT, json=BODY | {"stream": True}, headers={"x-request-id": "flows"}) as stream:
            stream.read()
        assert front.http.get("/metrics").status_code == 200

        def lines() -> dict[str, dict]:
            told = map(json.loads, front.log().splitlines())
            return {line["request_id"]: line for line in told if "seconds" in line}

        front.wait_until(lambda: lines().keys() == {"mine", "wrong", "flows"})
        mine, wrong, flows = (lines()[name] for name in ("mine", "wrong", "flows"))
        assert (mine["process"], mine["method"], mine["path"], mine["status"]) == ("front", "POST", CHAT, 200)
        assert mine["outcome"] == flows["outcome"] == "stop" and len(mine["choices"]) == 2
        assert mine["prompt_tokens"] == flows["prompt_tokens"] > 0
        assert mine["outputs"] == 2 * flows["outputs"] == 2 * len(reply(None))
        assert 0 < flows["first_output_s"] <= flows["seconds"] < 10
        assert wrong["status"] == 404 and "outcome" not in wrong
        assert wrong["error"].startswith("The model 'no' does not exist")
        assert sum("wrong" in line for line in front.log().splitlines()) == 1
