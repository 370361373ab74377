"""The watchdog on a real server: a stuck step, a silent worker, a device that is lost, a front that does not answer."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults.served import CARD_NAME, STUCK, write_faulty_llama
from support.server import Server, running
from support.streamed import Streamed

from mstar.api_server.loop_watch import LoopWatch
from mstar.communication.loopback import LoopbackNet
from mstar.communication.messages import Heartbeat
from mstar.communication.wire import decode_to_front, decode_to_worker
from mstar.worker.heartbeat import HeartbeatThread, StepAge

STEP_TIMEOUT_S = 1.0
WATCHDOG_S = 1.2
NOTICED_S = 0.5
"""How soon after its time the watchdog acts, at most, by the documentation."""
SETTINGS = [f"server.step_timeout_s={STEP_TIMEOUT_S}", f"server.watchdog_s={WATCHDOG_S}", "capture.enabled=false"]
SETTINGS += ["num_threads=1", "resources.kv.num_pages=64", "scheduler.max_step_tokens=256"]


@pytest.fixture(scope="module")
def faults_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "in"


@pytest.fixture(scope="module")
def server(faults_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    checkpoint = write_faulty_llama(directory / "checkpoint", faults_in)
    config = directory / "faulty.yaml"
    config.write_text(json.dumps({"model": CARD_NAME, "checkpoint": str(checkpoint), "dtype": "float32"}))
    arguments = [str(config), *(word for setting in SETTINGS for word in ("--set", setting))]
    with running(arguments, directory / "log") as started:
        yield started
        assert started.stop() == 0


def body(num_tokens: int = 8, **more: object) -> dict:
    asked = {"model": CARD_NAME, "prompt": [5, 6, 7], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return asked | more


def text_of(server: Server) -> str:
    response = server.client.post("/v1/completions", json=body())
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def health(server: Server) -> int:
    return server.client.get("/health").status_code


def assert_well_again(server: Server, text: str) -> None:
    server.wait_for(lambda: server.client.get("/ready").status_code == 200, 60, "ready")
    assert health(server) == 200
    assert text_of(server) == text
    server.wait_for(server.is_idle, 5, "nothing held")


def test_a_stuck_step_turns_health_red_dumps_the_stacks_once_and_ends_green(server: Server, faults_in: Path):
    text = text_of(server)
    (faults_in / STUCK).touch()
    logged = len(server.log.read_text())
    stream = Streamed(server.url, body())
    began = time.monotonic()
    while time.monotonic() - began < 0.6 * STEP_TIMEOUT_S:
        assert health(server) == 200, "a long step below the limit is healthy"
        time.sleep(0.05)
    server.wait_for(lambda: health(server) == 503, STEP_TIMEOUT_S + NOTICED_S + 1, "red health")
    assert time.monotonic() - began > STEP_TIMEOUT_S
    assert "has been in one step" in server.client.get("/health").text
    stream.join()
    assert stream.status == 503, "its request is not left waiting"
    assert server.client.post("/v1/completions", json=body()).status_code == 503
    time.sleep(3 * 0.25)  # some heartbeats later there is still one dump
    (faults_in / STUCK).unlink()
    server.wait_for(lambda: health(server) == 200, NOTICED_S + 1, "green health")
    said = server.log.read_text()[logged:]
    [headline] = re.findall(r".*has been in one step.*stacks.*", said)
    assert re.search(r"worker 0 has been in one step for \d\.\d s", headline)
    assert "a step of 1 rows of node 'LLM' (prefill)" in headline
    assert "heartbeat" in headline, "threads have names"
    assert "hold_while_stuck" in said, "where it is stuck"
    assert said.count("Current thread") == 1
    assert_well_again(server, text)


def test_another_stuck_step_is_dumped_again(server: Server, faults_in: Path):
    text = text_of(server)
    before = server.log.read_text().count("stacks of its threads")
    (faults_in / STUCK).touch()
    stream = Streamed(server.url, body())
    server.wait_for(lambda: health(server) == 503, STEP_TIMEOUT_S + NOTICED_S + 1, "red health")
    (faults_in / STUCK).unlink()
    stream.join()
    assert server.log.read_text().count("stacks of its threads") == before + 1
    assert_well_again(server, text)


def test_a_silent_worker_turns_health_red_within_the_watchdog_time(server: Server):
    text = text_of(server)
    [worker] = server.worker_pids()
    os.kill(worker, signal.SIGSTOP)
    try:
        took = server.wait_for(lambda: health(server) == 503, WATCHDOG_S + NOTICED_S + 1, "red health")
        assert took > WATCHDOG_S - 0.3 - NOTICED_S
        assert "no heartbeat" in server.client.get("/health").text
    finally:
        os.kill(worker, signal.SIGCONT)
    assert_well_again(server, text)


@pytest.mark.parametrize("fault", ["raise", "out-of-memory"])
def test_a_step_that_fails_fails_its_requests_only(server: Server, faults_in: Path, fault: str):
    text = text_of(server)
    [worker] = server.worker_pids()
    (faults_in / fault).touch()
    response = server.client.post("/v1/completions", json=body())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "request_failed")
    assert server.worker_pids() == [worker]
    assert_well_again(server, text)


def test_a_lost_device_ends_the_worker_and_it_comes_back(server: Server, faults_in: Path):
    text = text_of(server)
    [worker] = server.worker_pids()
    restarts = server.gauges()["mstar_worker_restarts_total"]
    (faults_in / "lost-device").touch()
    response = server.client.post("/v1/completions", json=body())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")
    server.wait_for(lambda: worker not in server.worker_pids(), 10, "the worker's end")
    assert_well_again(server, text)
    assert server.gauges()["mstar_worker_restarts_total"] == restarts + 1
    assert "AcceleratorError: CUDA error: an illegal memory access" in server.log.read_text()


def test_a_loop_that_hangs_beside_its_steps_counts_as_stuck(capfd: pytest.CaptureFixture[str]):
    """A hook that never returns, say: no step is on the device."""
    net, age = LoopbackNet(), StepAge()
    front, bus = net.bus("front", decode_to_front), net.bus("w0", decode_to_worker)
    bus.connect("front", "front")
    assert age.seconds() == 0
    age.tick_ns = time.monotonic_ns() - 5_000_000_000
    heartbeat = HeartbeatThread(bus, "front", 0, 1, age, step_timeout_s=4)
    heartbeat.start()
    time.sleep(0.6)
    heartbeat.close()
    beats = [message for message in front.receive() if isinstance(message, Heartbeat)]
    assert len(beats) >= 2
    assert all(beat.step_age_s > 4 for beat in beats)
    assert capfd.readouterr().err.count("Current thread") == 1
    age.tick_ns = 0
    assert age.seconds() == 0, "at rest"
    for one in (front, bus):
        one.close()


def test_a_loop_that_does_not_answer_is_dumped_once(capfd: pytest.CaptureFixture[str]):
    async def front() -> None:
        watch = LoopWatch(asyncio.get_running_loop(), 0.1)
        watch.start()
        await asyncio.sleep(0.3)
        time.sleep(0.8)  # blocks the loop
        await asyncio.sleep(0.3)
        watch.close()

    asyncio.run(front())
    assert capfd.readouterr().err.count("Current thread") == 1
    assert "loop-watch" not in [thread.name for thread in threading.enumerate()]
