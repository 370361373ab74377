"""Qwen3.5 with its vision tower in a worker of its own, which freezes, dies and comes back: texts do not notice."""

import os
import signal

import pytest
from support.qwen3_5_media import chat, picture
from support.qwen3_5_server import NAME, Case, ServedQwen, ask
from support.streamed import Streamed

from mstar.model.base import PromptRequest

TEXT = Case(PromptRequest("completion", token_ids=tuple(range(5, 60))), 16)
IMAGE = Case(chat(("image", picture(70, 90, 1)), "What is this?"), 8)
LONG = {"model": NAME, "prompt": list(range(7, 30)), "max_tokens": 400, "temperature": 0}


@pytest.mark.timeout(240)
def test_texts_do_not_notice_what_becomes_of_the_vision_worker(tmp_path):
    qwen = ServedQwen(tmp_path, "tiny")
    with qwen.serving(tmp_path / "log", "server.watchdog_s=2", config="qwen3_5_4b") as server:
        qwen.check([TEXT, IMAGE], [ask(server, TEXT), ask(server, IMAGE)])
        language, vision = server.worker_pids()
        running = Streamed(server.url, LONG)
        running.wait_for_text()
        os.kill(vision, signal.SIGSTOP)
        qwen.check([TEXT], [ask(server, TEXT)])
        server.wait_for(lambda: server.client.get("/health").status_code == 503, 10, "red health")
        qwen.check([TEXT], [ask(server, TEXT)])
        embedded = server.client.post("/v1/embeddings", json={"model": NAME, "input": "hi"})
        assert embedded.status_code == 200, embedded.text
        refused = server.client.post(IMAGE.route, json=IMAGE.body())
        assert refused.status_code == 503, refused.text
        assert "worker 1" in refused.json()["error"]["message"]
        os.kill(vision, signal.SIGKILL)
        qwen.check([TEXT], [ask(server, TEXT)])
        running.join()
        assert running.error is None and running.lines[-1] == "data: [DONE]"
        server.wait_for(lambda: server.client.get("/ready").status_code == 200, 60, "recovery")
        assert language in server.worker_pids(), "the other worker was not restarted"
        qwen.check([TEXT, IMAGE], [ask(server, TEXT), ask(server, IMAGE)])
        server.wait_for(server.is_idle, 5, "everything given back")
        assert server.stop() == 0
