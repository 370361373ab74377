"""The processes of a server: what ends, what starts again, what is left behind; by real signals to real processes."""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server import Server, running, start
from support.slow_llama import CARD_NAME, write_slow_llama
from support.streamed import Streamed

FAST = ["--set", "server.watchdog_s=1.5", "--set", "server.drain_timeout_s=20", "--set", "resources.kv.num_pages=64"]
FAST += ["--set", "capture.enabled=false"]  # a tape would leave the delays out
STALL_TOKENS = 41


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """20 ms a step; a step of exactly `STALL_TOKENS` tokens takes 4 s."""
    directory = tmp_path_factory.mktemp("slow")
    return write_slow_llama(directory, forward_delay_s=0.02, stall_tokens=STALL_TOKENS, stall_s=4.0)


@pytest.fixture(scope="module")
def config(checkpoint) -> list[str]:
    path = checkpoint.parent / "slow.yaml"
    path.write_text(
        json.dumps({"model": CARD_NAME, "checkpoint": str(checkpoint), "dtype": "float32", "num_threads": 1})
    )
    return [str(path), *FAST]


@pytest.fixture(scope="module")
def shared(config, tmp_path_factory):
    """One server for the tests that leave it as it was."""
    with running(config, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Short, because the paths of sockets are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def body(num_tokens: int = 12, **more) -> dict:
    return {
        "model": CARD_NAME,
        "prompt": [5, 6, 7],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def text_of(server: Server, **more) -> str:
    response = server.client.post("/v1/completions", json=body(**more))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def streamed(server: Server, **more) -> Streamed:
    return Streamed(server.url, body(**more))


def alive(pids) -> list[int]:
    """Those of `pids` that still run (a zombie has ended)."""
    running_now = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                running_now.append(pid)
        except FileNotFoundError:
            pass
    return running_now


def descendants(server: Server) -> list[int]:
    found, todo = [], [server.pid]
    while todo:
        pid = todo.pop()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children = [int(child) for child in (thread / "children").read_text().split()]
            found += children
            todo += children
    return found


def test_a_killed_worker_fails_its_requests_and_comes_back(config, tmp_path):
    """Case E6, SIGKILL: an error event within 2 s, red health, then the same text as before."""
    with running(config, tmp_path / "log") as server:
        before = text_of(server)
        stream = streamed(server, num_tokens=200)
        stream.wait_for_text()
        [worker] = server.worker_pids()
        os.kill(worker, signal.SIGKILL)
        killed_at = time.monotonic()
        server.wait_for(lambda: server.client.get("/health").status_code == 503, 2, "red health")
        assert server.client.post("/v1/completions", json=body()).status_code == 503
        stream.join()
        assert stream.ended_at - killed_at < 2
        assert stream.error is not None
        assert stream.error["code"] == "worker_lost"
        assert "data: [DONE]" not in stream.lines
        server.wait_for(lambda: server.client.get("/ready").status_code == 200, 60, "recovery")
        assert server.client.get("/health").status_code == 200
        assert text_of(server) == before
        assert server.gauges()["mstar_worker_restarts_total"] == 1
        server.wait_for(server.is_idle, 2, "idle")
        assert server.stop() == 0


def test_a_stopped_worker_is_noticed_by_the_watchdog(shared):
    """Case E6, SIGSTOP: red within the watchdog's time, running streams fail, green again when it goes on."""
    [worker] = shared.worker_pids()
    stream = streamed(shared, num_tokens=200)
    stream.wait_for_text()
    os.kill(worker, signal.SIGSTOP)
    try:
        took = shared.wait_for(lambda: shared.client.get("/health").status_code == 503, 4, "red health")
        assert took > 0.5
        stream.join()
        assert stream.error is not None
        assert shared.client.post("/v1/completions", json=body()).status_code == 503
    finally:
        os.kill(worker, signal.SIGCONT)
    shared.wait_for(lambda: shared.client.get("/ready").status_code == 200, 10, "green health")
    assert text_of(shared)


def test_a_long_healthy_step_stays_green(shared):
    """Case E6, a step of 4 s under a watchdog of 1.5 s."""
    stream = streamed(shared, num_tokens=2, prompt=list(range(3, 3 + STALL_TOKENS)))
    for _ in range(12):
        assert shared.client.get("/health").status_code == 200
        time.sleep(0.25)
    stream.join()
    assert stream.error is None
    assert stream.lines[-1] == "data: [DONE]"


def test_nothing_survives_the_death_of_the_parent(config, tmp_path, sockets: Path):
    """Case E7."""
    with running(config, tmp_path / "log", MSTAR_SOCKET_DIR=str(sockets)) as server:
        stream = streamed(server, num_tokens=200)
        stream.wait_for_text()
        children = descendants(server)
        assert len(children) >= 3, "front, worker and a preprocess process"
        server.process.kill()
        server.process.wait()
        server.wait_for(lambda: not alive(children), 10, "children gone")
    assert list(sockets.iterdir()), "nobody could clear up"
    with running(config, tmp_path / "log2", MSTAR_SOCKET_DIR=str(sockets)) as server:
        assert text_of(server)
        assert len(list(sockets.iterdir())) == 1, "the next start clears what a killed instance left"
        assert server.stop() == 0
    assert not list(sockets.iterdir())


def test_sigterm_lets_running_requests_finish(config, tmp_path):
    """Case E9: new requests 503 while running ones finish, exit code 0."""
    with running(config, tmp_path / "log") as server:
        expected = text_of(server, num_tokens=100)
        stream = streamed(server, num_tokens=100)
        stream.wait_for_text()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.client.post("/v1/completions", json=body()).status_code == 503, 2, "refusal")
        assert server.client.get("/live").status_code == 200
        stream.join()
        assert stream.lines[-1] == "data: [DONE]"
        pieces = [json.loads(line.removeprefix("data: ")) for line in stream.lines[:-1]]
        assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == expected
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_everything_now(config, tmp_path):
    with running(config, tmp_path / "log") as server:
        children = descendants(server)
        stream = streamed(server, num_tokens=230)
        stream.wait_for_text()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.client.get("/ready").status_code == 503, 2, "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) != 0
        server.wait_for(lambda: not alive(children), 5, "children gone")
        said = server.log.read_text()
    assert "W mstar: a second signal asks for the end at once; killed: front\n" in said
    assert "in time" not in said


def test_a_port_in_use_is_reported_at_once(config, tmp_path):
    """Case E11."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = start([*config, "--port", str(port)], tmp_path / "log")
        assert process.wait(20) == 2
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = " ".join((tmp_path / "log").read_text().split())
    assert f"cannot listen at 127.0.0.1:{port}" in said
    assert "Address already in use" in said
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2, "CPU time, whatever else runs"


def test_a_child_that_cannot_start_ends_the_start_with_its_traceback(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    shard = min(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    process = start([str(broken), "--port", "0"], tmp_path / "log")
    assert process.wait(60) == 1
    said = (tmp_path / "log").read_text()
    assert "Traceback" in said
    assert shard.name in said
    assert "during start-up" in " ".join(said.split())


def test_a_socket_directory_of_150_characters(config, tmp_path):
    """Case E12; shorter ones are in the tests of addresses."""
    length = 150
    directory = Path("/tmp") / ("s" * (length - len("/tmp/")))
    directory.mkdir(exist_ok=True)
    assert len(str(directory)) == length
    try:
        with running(config, tmp_path / "log", MSTAR_SOCKET_DIR=str(directory)) as server:
            assert text_of(server)
            assert server.stop() == 0
        assert not list(directory.iterdir())
    finally:
        directory.rmdir()


def test_two_servers_of_one_user_live_side_by_side(config, shared, tmp_path):
    with running(config, tmp_path / "log") as other:
        assert text_of(other) == text_of(shared)
        assert other.stop() == 0
    assert text_of(shared)


def cpu_s(pids) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_closed_sockets_give_everything_back_and_an_idle_server_sleeps(shared):
    """Case E1: 200 requests whose sockets close at random points: before the first token, midway, not streamed."""
    rng = random.Random(1)
    host, port = shared.url.removeprefix("http://").split(":")
    payloads = [json.dumps(body(num_tokens=60, stream=streams)).encode() for streams in (True, False)]
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    )

    def one(index: int) -> None:
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            payload = payloads[index % 7 == 0]
            connection.sendall(request % (len(payload), payload))
            if index % 7 == 0:
                time.sleep(rng.uniform(0, 0.3))
                return
            if index % 3 == 0:
                return
            received, wanted = b"", rng.randint(1, 12)
            while received.count(b"data: ") < wanted and (chunk := connection.recv(65536)):
                received += chunk

    pending = list(range(200))

    def client() -> None:
        while pending:
            one(pending.pop())

    threads = [threading.Thread(target=client) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    shared.wait_for(shared.is_idle, 1, "pages, handles and tensors given back")
    assert text_of(shared)
    shared.wait_for(shared.is_idle, 1, "idle")
    processes = [shared.pid, *descendants(shared)]
    time.sleep(0.5)
    before = cpu_s(processes)
    time.sleep(8)
    used = cpu_s(processes) - before
    assert used < 0.08, f"an idle server used {used:.2f} s of CPU in 8 s"


def test_the_command_line_without_a_server():
    """`mstar chat` against nothing says so."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", "mstar.cli", "chat", "--url", f"http://127.0.0.1:{port}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no server answers" in done.stdout
