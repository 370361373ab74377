"""A server whose model spans three workers loses one after the other, by SIGKILL, while requests run and while they are
being opened: every request fails with an error, the other workers keep nothing of it, and afterwards the answers are
those of the reference again. What is sent between the workers is looked at in
`test_recovery.py` of the composite model.
"""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.composite import reference
from support.composite.deployment import CONFIG, PLACEMENTS, WEIGHTS_SEED, write_checkpoint
from support.composite.served import CARD_NAME, ServedComposite
from support.instance import shared_memory_of
from support.server import Server, running
from support.streamed import Streamed

from mstar.communication.arena import SHM_DIR
from mstar.model.base import ModelSetup, PromptRequest

PROMPTS = ([5, 9, 2], [7], [30, 31, 8, 1, 12, 4])
SHORT, LONG = 12, 150
"""Tokens of a request that is compared, and of one that is still running when its worker is killed."""


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """Short, because the paths of sockets are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def instance_in(sockets: Path) -> str:
    [private] = sockets.iterdir()
    return private.name.rpartition("-")[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sockets: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    checkpoint = write_checkpoint(directory / "checkpoint", forward_delay_s=0.02)
    ranks = PLACEMENTS["three_workers"]
    config = {
        "model": CARD_NAME,
        "checkpoint": str(checkpoint),
        "dtype": "float32",
        "num_threads": 1,
        "capture": {"enabled": False},
        "resources": {"kv": {"num_pages": 64}},
        "node_groups": [
            {"node_names": [node for node, at in ranks.items() if at == rank], "ranks": [rank]} for rank in range(3)
        ],
    }
    path = directory / "composite.yaml"
    path.write_text(json.dumps(config))
    with running([str(path)], directory / "log", MSTAR_SOCKET_DIR=str(sockets)) as started:
        name = instance_in(sockets)
        yield started
        assert started.stop() == 0
    assert shared_memory_of(name) == []


def asked(prompt: list[int], num_tokens: int) -> dict:
    return {"model": CARD_NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}


def expected(prompt: list[int]) -> str:
    model = ServedComposite(ModelSetup(CONFIG, None, 256))
    inputs = model.process_prompt(PromptRequest("native", token_ids=tuple(prompt))).inputs
    media, latent = (torch.from_numpy(np.asarray(inputs[name])) for name in ("media", "latent"))
    outputs = reference.run(reference.make_weights(WEIGHTS_SEED), media, latent, prompt, SHORT)
    return " ".join(f"t{token}" for token in outputs.tokens)


def assert_right_answers(server: Server) -> None:
    for prompt in PROMPTS:
        response = server.client.post("/v1/completions", json=asked(prompt, SHORT))
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        assert choice["text"].split() == expected(prompt).split()


def shared_memory(instance: str) -> list[int]:
    """Bytes of the files that an instance has in shared memory."""
    return sorted((SHM_DIR / name).stat().st_blocks * 512 for name in shared_memory_of(instance))


def oldest_worker(server: Server) -> int:
    return server.worker_pids()[0]


@pytest.mark.timeout(300)
def test_each_worker_is_lost_in_the_middle_of_requests(server: Server, sockets: Path):
    assert_right_answers(server)
    server.wait_for(server.is_idle, 5, "idle")
    instance = instance_in(sockets)
    baseline = shared_memory(instance)
    assert len(baseline) == 3, "each worker has an arena"
    for index in range(3):  # the one that has run longest is another each time
        streams = [Streamed(server.url, asked(prompt, LONG)) for prompt in PROMPTS]
        for stream in streams:
            stream.wait_for_text()
        os.kill(oldest_worker(server), signal.SIGKILL)
        for stream in streams:
            stream.join(2)
            assert stream.error is not None and stream.error["code"] == "worker_lost"
            assert stream.lines[-1] != "data: [DONE]"
        assert server.client.get("/health").status_code == 503
        server.wait_for(server.is_idle, 2, "the others hold nothing")
        server.wait_for(lambda: server.client.get("/ready").status_code == 200, 60, "recovery")
        assert server.gauges()["mstar_worker_restarts_total"] == index + 1
        assert_right_answers(server)
        server.wait_for(server.is_idle, 5, "idle")
        server.wait_for(lambda: shared_memory(instance) == baseline, 5, "shared memory as before")


@pytest.mark.timeout(120)
def test_a_worker_is_lost_while_requests_are_being_opened(server: Server):
    """It is stopped first, so that it has been asked for room and does not answer."""
    server.wait_for(lambda: server.client.get("/ready").status_code == 200, 60, "ready")
    num_before = server.gauges()["mstar_worker_restarts_total"]
    victim = server.worker_pids()[1]
    os.kill(victim, signal.SIGSTOP)
    streams = [Streamed(server.url, asked(prompt, SHORT)) for prompt in PROMPTS]
    server.wait_for(lambda: server.gauges()["mstar_handles"] >= len(PROMPTS), 5, "room promised by the worker before")
    os.kill(victim, signal.SIGKILL)
    for stream in streams:
        stream.join(2)
        assert stream.status == 503, (stream.status, stream.lines)
    server.wait_for(server.is_idle, 2, "the others hold nothing")
    server.wait_for(lambda: server.client.get("/ready").status_code == 200, 60, "recovery")
    assert server.gauges()["mstar_worker_restarts_total"] == num_before + 1
    assert_right_answers(server)
    server.wait_for(server.is_idle, 5, "idle")


def test_the_answers_of_the_model_differ(server: Server):
    """Otherwise equal answers would say little."""
    assert len({expected(prompt) for prompt in PROMPTS}) == len(PROMPTS)
    assert server.log.read_text().count("Traceback") == 0
