"""A whole server that is full: what is taken on, what is refused, what ends at its deadline, and what prompts share."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from support.running_front import Streamed
from support.server import Server, running
from support.slow_llama import CARD_NAME, write_slow_llama

MAX_ROWS, MAX_QUEUE = 2, 3
PAGE = 64
ROUTE = "/v1/completions"


@pytest.fixture(scope="module")
def _started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """20 ms a step."""
    directory = tmp_path_factory.mktemp("full")
    checkpoint = write_slow_llama(directory / "slow", forward_delay_s=0.02)
    path = directory / "full.yaml"
    path.write_text(
        json.dumps(
            {
                "model": CARD_NAME,
                "checkpoint": str(checkpoint),
                "dtype": "float32",
                "num_threads": 1,
                "scheduler": {"max_rows": MAX_ROWS, "max_queue": MAX_QUEUE},
                "resources": {"kv": {"num_pages": 64}},
                "capture": {"enabled": False},
            }
        )
    )
    with running([str(path)], directory / "log") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def server(_started: Server) -> Iterator[Server]:
    yield _started
    _started.wait_for(_started.is_idle, 5, "everything given back")


def body(num_tokens: int = 20, **more: object) -> dict:
    asked = {"model": CARD_NAME, "prompt": [5, 6, 7], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return asked | more


def test_as_many_as_run_and_wait_are_taken_on(server: Server):
    """All at once, so that none has emitted when the last one comes."""
    alone = server.client.post(ROUTE, json=body()).json()["choices"]
    gate = threading.Barrier(MAX_ROWS + MAX_QUEUE + 4)

    def ask(_: int) -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            gate.wait(20)
            return client.post(ROUTE, json=body())

    with ThreadPoolExecutor(gate.parties) as threads:
        answers = list(threads.map(ask, range(gate.parties)))
    taken = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert [answer.json()["choices"] for answer in taken] == [alone] * (MAX_ROWS + MAX_QUEUE)
    for answer in refused:
        assert answer.status_code == 429 and 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "queue_full"


def test_places_change_hands_without_a_gap(server: Server):
    """Clients that leave and come while the server is full: each new one is taken on or refused as full, but none fails
    because the worker has not yet forgotten the last one."""
    statuses: list[int] = []
    ends_at = time.monotonic() + 3

    def come_and_go(index: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while time.monotonic() < ends_at:
                with client.stream("POST", ROUTE, json=body(200, stream=True)) as answer:
                    statuses.append(answer.status_code)
                    if answer.status_code == 200:
                        text = next(answer.iter_text())
                        assert "error" not in text, text
                    else:
                        time.sleep(0.01)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(come_and_go, range(8)))
    assert set(statuses) == {200, 429}
    assert statuses.count(200) > 20


def test_a_deadline_ends_what_waits_and_nothing_else(server: Server):
    with ThreadPoolExecutor(MAX_ROWS) as threads:
        running_ones = [threads.submit(server.client.post, ROUTE, json=body(100, stream=True)) for _ in range(MAX_ROWS)]
        server.wait_for(lambda: server.gauges().get("mstar_running_rows") == MAX_ROWS, 10, "both run")
        began = time.monotonic()
        waiting = server.client.post(ROUTE, json=body(timeout=0.4))
        assert waiting.status_code == 504 and waiting.json()["error"]["code"] == "request_timeout"
        assert 0.4 <= time.monotonic() - began < 1.5
        streams = [Streamed.parse(each.result(30)) for each in running_ones]
    assert all(stream.is_done and stream.reasons() == ["length"] for stream in streams)
    assert streams[0].text() == streams[1].text() != ""


def test_what_waits_starts_by_priority_then_by_arrival(server: Server):
    """One row is busy for long; the other takes what waits, one after the other."""
    ended: list[str] = []

    def ask(name: str, **more: object) -> None:
        assert server.client.post(ROUTE, json=body(**more)).status_code == 200
        ended.append(name)

    with ThreadPoolExecutor(MAX_ROWS + MAX_QUEUE) as threads:
        asked = [threads.submit(ask, "long", num_tokens=150), threads.submit(ask, "short", num_tokens=40)]
        server.wait_for(lambda: server.gauges().get("mstar_running_rows") == MAX_ROWS, 10, "both run")
        for name, priority in (("later", 7), ("first", 0), ("second", 0)):
            known = server.gauges()["mstar_live_requests"]
            asked.append(threads.submit(ask, name, num_tokens=5, priority=priority))
            server.wait_for(lambda known=known: server.gauges()["mstar_live_requests"] > known, 10, "taken on")
            time.sleep(0.05)
        for each in asked:
            each.result(60)
    assert ended == ["short", "first", "second", "later", "long"]


def test_cached_tokens_are_what_was_not_computed(server: Server):
    """A repeated prompt, and one that shares 2 pages of it, through the official client; a salt shares nothing."""
    prompt = [5 + index % 40 for index in range(3 * PAGE + 5)]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:

        def ask(ids: list[int], **more: object) -> tuple[int, str]:
            answer = client.completions.create(model=CARD_NAME, prompt=ids, max_tokens=4, temperature=0, **more)
            assert answer.usage.prompt_tokens == len(ids)
            return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text

        first = ask(prompt)
        again = ask(prompt)
        assert (first[0], again[0]) == (0, 3 * PAGE)
        assert first[1] == again[1]
        assert ask([*prompt[: 2 * PAGE + 3], 90, 91, 92])[0] == 2 * PAGE
        assert ask(prompt[: 3 * PAGE])[0] == 2 * PAGE, "the last token is always computed"
        salted = {"extra_body": {"cache_salt": "mine"}}
        assert [ask(prompt, **salted)[0] for _ in range(2)] == [0, 3 * PAGE]
        stream = client.completions.create(
            model=CARD_NAME,
            prompt=[prompt, prompt[: 2 * PAGE + 1]],
            n=2,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        (usage,) = [chunk.usage for chunk in stream if chunk.usage is not None]
        assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (5 * PAGE + 6, 5 * PAGE)
