"""A request's own deadline: 504 before the first byte, an error event after it, wherever the request is by then."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from support.fake_worker import endless
from support.running_front import MODEL, RunningFront, Streamed, build_spec
from support.tiny_text import build_tokenizer

from mstar.communication.messages import Remove
from mstar.config.schema import ServerConfig

MESSAGES = [{"role": "user", "content": "hi"}]
SOON = {"timeout": 0.3}


@pytest.fixture
def client(front: RunningFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.base_url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def timed_out(error: dict) -> bool:
    assert error["type"] == "server_error" and "0.3 s" in error["message"]
    return error["code"] == "request_timeout"


def test_a_whole_answer_that_takes_too_long(slow: RunningFront, client: openai.OpenAI):
    before = time.monotonic()
    with pytest.raises(openai.InternalServerError) as chat:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=SOON)
    assert 0.3 <= time.monotonic() - before < 5
    with pytest.raises(openai.InternalServerError) as text:
        client.completions.create(model=MODEL, prompt="hi", max_tokens=200, extra_body=SOON)
    assert [caught.value.status_code for caught in (chat, text)] == [504, 504]
    assert timed_out(chat.value.body) and timed_out(text.value.body)
    slow.wait_until(lambda: slow.worker.num_open == 0)
    assert isinstance(slow.worker.received[-1], Remove)


def test_a_stream_that_takes_too_long_ends_with_an_error_event(slow: RunningFront, client: openai.OpenAI):
    answer = slow.chat(stream=True, **SOON)
    stream = Streamed.parse(answer)
    assert answer.status_code == 200 and len(stream.text()) > 0
    assert not stream.is_done and stream.reasons() == []
    assert [timed_out(event["error"]) for event in stream.errors] == [True]
    chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, extra_body=SOON)
    assert next(chunks).choices[0].delta.role == "assistant"
    with pytest.raises(openai.APIError, match=r"within 0\.3 s"):
        list(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_holds_before_the_first_token(slow: RunningFront, stream: bool):
    slow.call(lambda: setattr(slow.worker, "is_paused", True))
    answer = slow.chat(stream=stream, n=2, **SOON)
    assert answer.status_code == 504 and timed_out(answer.json()["error"])
    slow.wait_until(lambda: slow.worker.num_open == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_holds_while_the_prompt_is_prepared(
    front: RunningFront, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    async def endless_work(*_: object) -> None:
        await asyncio.Event().wait()

    num_openings = len(front.openings())
    with monkeypatch.context() as patch:
        patch.setattr(front.parts.pool, "prepare", endless_work)
        answer = front.chat(stream=stream, **SOON)
    assert answer.status_code == 504 and timed_out(answer.json()["error"])
    assert front.parts.handle.num_live == 0
    assert len(front.openings()) == num_openings, "it never came to a worker"


def test_a_deadline_that_is_kept_changes_nothing(front: RunningFront):
    before = front.chat().json()["choices"]
    assert front.chat(timeout=0.5).json()["choices"] == before
    time.sleep(0.6)
    assert front.chat(timeout=1e9).json()["choices"] == before
    assert front.parts.handle.num_live == 0


@pytest.mark.parametrize(("server_s", "own_s"), [(0.3, 30), (30, 0.3), (0.3, None)])
def test_the_smaller_of_both_limits_holds(tmp_path: Path, server_s: float, own_s: float | None):
    spec = replace(build_spec(tmp_path), server=ServerConfig(request_timeout_s=server_s))
    with RunningFront(spec, build_tokenizer(), endless) as front:
        front.call(lambda: setattr(front.worker, "step_s", 0.01))
        before = time.monotonic()
        answer = front.chat(timeout=own_s)
        assert answer.status_code == 504 and timed_out(answer.json()["error"])
        assert time.monotonic() - before < 10
        front.wait_until(lambda: front.worker.num_open == 0)
        assert front.chat(max_tokens=3, timeout=own_s).status_code == 200
