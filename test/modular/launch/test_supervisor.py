"""The supervisor's decisions: when a worker starts again, and what a loss means while the server ends."""

import json
import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.server import running
from support.slow_llama import CARD_NAME, write_slow_llama

from mstar.communication.messages import Ready
from mstar.launch import supervisor as supervisor_module
from mstar.launch.children import ChildSpec
from mstar.launch.supervisor import LONGEST_BACKOFF_S, STABLE_S, Supervisor, _Post

READY = Ready(rank=0, incarnation=0, max_total_tokens=0)


def test_a_worker_that_never_serves_is_started_less_and_less_often_however_long_it_loads():
    post = _Post(0)
    load_s = 2 * STABLE_S
    assert [post.plan_restart(load_s * i) for i in range(1, 5)] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    for _ in range(2000):
        assert post.plan_restart(0.0) <= LONGEST_BACKOFF_S
    assert post.due_at == LONGEST_BACKOFF_S


def test_long_service_is_forgiven_and_short_service_is_not():
    post = _Post(0, num_failures=4, ready=READY, ready_at=1000.0)
    assert post.plan_restart(1000.0 + STABLE_S - 1) == pytest.approx(3.2)
    post.ready, post.ready_at = READY, 2000.0
    assert post.plan_restart(2000.0 + STABLE_S + 1) == pytest.approx(0.2)


def test_a_worker_lost_while_the_server_drains_fails_its_requests_at_once(tmp_path):
    checkpoint = write_slow_llama(tmp_path / "slow", forward_delay_s=0.05)
    config = tmp_path / "slow.yaml"
    config.write_text(
        json.dumps({"model": CARD_NAME, "checkpoint": str(checkpoint), "dtype": "float32", "num_threads": 1})
    )
    overrides = ("server.watchdog_s=30", "server.drain_timeout_s=40", "capture.enabled=false")
    arguments = [str(config), *(word for override in overrides for word in ("--set", override))]
    with running(arguments, tmp_path / "log") as server:
        ended: dict[str, float] = {}
        asked = {"model": CARD_NAME, "prompt": [5, 6, 7], "max_tokens": 240, "ignore_eos": True}

        def ask() -> None:
            ended["status"] = server.client.post("/v1/completions", json=asked).status_code
            ended["at"] = time.monotonic()

        client = threading.Thread(target=ask)
        client.start()
        server.wait_for(lambda: server.gauges()["mstar_running_rows"] == 1, 10, "a running request")
        [worker] = server.worker_pids()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "draining" in server.log.read_text(), 5, "the drain")
        os.kill(worker, signal.SIGKILL)
        killed_at = time.monotonic()
        client.join(60)
        assert ended["status"] == 503
        assert ended["at"] - killed_at < 3
        assert server.process.wait(20) == 0
        said = server.log.read_text()
    for line in (
        r"I mstar: draining: new requests are refused, running ones may take 40 s",
        r"I front: draining; running requests: 1",
        r"E mstar: worker 0 .*; the server ends, so it is not started again",
    ):
        assert re.search(rf"^\d\d:\d\d:\d\d {line}$", said, re.MULTILINE), said


def test_a_worker_is_told_of_all_others_when_it_starts(monkeypatch: pytest.MonkeyPatch):
    specs: list[ChildSpec] = []

    def start_child(spec: ChildSpec) -> Any:
        specs.append(spec)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(supervisor_module, "start_child", start_child)
    config = SimpleNamespace(num_workers=3, server=SimpleNamespace(log_format="text"))
    deployment: Any = SimpleNamespace(config=config, facts=None)
    listener: Any = SimpleNamespace(fileno=lambda: 0)
    made = Supervisor(deployment, listener)
    try:
        for post in made._posts():
            made._spawn(post)
        address = {spec.rank: spec.address for spec in specs}
        for spec in specs[1:]:
            assert {peer.rank: peer.address for peer in spec.peers} == {
                rank: place for rank, place in address.items() if rank != spec.rank
            }
            assert {peer.incarnation for peer in spec.peers} == {0}
        made._workers[1].child = None  # it has ended and is not started yet
        made._spawn(made._workers[0])
        assert {peer.rank for peer in specs[-1].peers} == {-1, 2}
    finally:
        for post in made._posts():
            post.child = None
        made._bus.close()
        made._instance.close()
