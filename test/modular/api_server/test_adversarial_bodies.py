"""Bodies that are made to cost time: validation stays about as cheap as parsing, whatever is wrong in them."""

import json
import time
from typing import Any

import msgspec
import pytest
from support.running_front import MAX_SEQ_LEN, MODEL, RunningFront

from mstar.api_server.errors import error_body
from mstar.api_server.json_body import parse_json
from mstar.api_server.openai.chat_schema import MAX_MESSAGES, MAX_PARTS, ChatRequest
from mstar.api_server.openai.completion_schema import MAX_PROMPTS, CompletionRequest
from mstar.api_server.openai.fields import Schema
from mstar.api_server.token_routes import DetokenizeRequest, TokenizeRequest
from mstar.conductor.events import RefusedError

NUM_BYTES = 1_000_000
MOST_CPU_S = 0.2
"""For a body of NUM_BYTES, beside parsing it: far below one error for each element, far above what is needed."""
USER = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CHAT = {"model": MODEL, "messages": [USER]}
TEXT = {"model": MODEL, "prompt": "x"}


def many(element: Any) -> list[Any]:
    return [element] * (NUM_BYTES // (len(json.dumps(element)) + 2))


def keys(value: Any) -> dict[str, Any]:
    return {str(i): value for i in range(NUM_BYTES // (len(json.dumps(value)) + 11))}


COSTLY: list[tuple[type[Schema], dict[str, Any], str]] = [
    (CompletionRequest, TEXT | {"prompt": many("x")}, "prompt"),
    (CompletionRequest, TEXT | {"prompt": many([])}, "prompt"),
    (CompletionRequest, TEXT | {"prompt": many([1])}, "prompt"),
    (CompletionRequest, TEXT | {"prompt": many({})}, "prompt"),
    (CompletionRequest, TEXT | {"prompt": many(None)}, "prompt"),
    (CompletionRequest, TEXT | {"prompt": [1, *many("x")]}, "prompt"),
    (CompletionRequest, TEXT | {"prompt": ["x", *many(1)]}, "prompt"),
    (CompletionRequest, TEXT | {"prompt": [many("x")]}, "prompt"),
    (CompletionRequest, TEXT | {"prompt": keys(1)}, "prompt"),
    (ChatRequest, CHAT | {"messages": many({})}, "messages"),
    (ChatRequest, CHAT | {"messages": many("x")}, "messages"),
    (ChatRequest, CHAT | {"messages": many(USER)}, "messages"),
    (ChatRequest, CHAT | {"messages": [keys(1)]}, "messages[0].role"),
    (ChatRequest, CHAT | {"messages": [USER | {"content": many({})}]}, "messages"),
    (ChatRequest, CHAT | {"messages": [USER | {"content": many(1)}]}, "messages"),
    (ChatRequest, CHAT | {"messages": [USER | {"content": many(PART)}]}, "messages"),
    (ChatRequest, CHAT | {"messages": [USER | {"content": [keys(1)]}]}, "messages[0].content[0].type"),
    (ChatRequest, CHAT | {"messages": [USER | {"content": keys(1)}]}, "messages[0].content"),
    (ChatRequest, CHAT | {"messages": [USER | {"tool_calls": many(1)}]}, "messages[0].tool_calls"),
    (ChatRequest, CHAT | {"stop": many(1)}, "stop"),
    (ChatRequest, CHAT | {"stop": many("x")}, "stop"),
    (ChatRequest, CHAT | {"stop_token_ids": many("x")}, "stop_token_ids"),
    (ChatRequest, CHAT | {"logit_bias": keys("x")}, "logit_bias"),
    (ChatRequest, CHAT | {"metadata": keys(1)}, "metadata"),
    (ChatRequest, CHAT | {"parameters": keys(1)}, "parameters"),
    (ChatRequest, CHAT | {"tools": many(1)}, "tools"),
    (ChatRequest, CHAT | {"modalities": many("text")}, "modalities"),
    (ChatRequest, CHAT | {"modalities": many(1)}, "modalities"),
    (ChatRequest, CHAT | {"stream_options": keys(1)}, "stream_options.0"),
    (ChatRequest, keys(1), "model"),
    (TokenizeRequest, {"messages": many({})}, "messages"),
    (DetokenizeRequest, {"tokens": many("x")}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(COSTLY)))
def test_the_time_of_a_wrong_body_is_bounded(case: int):
    schema, value, param = COSTLY[case]
    body = json.dumps(value).encode()
    assert len(body) > NUM_BYTES * 0.8
    excess: list[float] = []
    for _ in range(3):  # what else the process does now and then, as collecting garbage, is not the body's
        began = time.thread_time()
        msgspec.json.decode(body)
        parsed = time.thread_time()
        with pytest.raises(RefusedError) as caught:
            parse_json(body, schema)
        answer = error_body(caught.value.failure)
        excess.append(time.thread_time() - parsed - 2 * (parsed - began))
    assert min(excess) < MOST_CPU_S
    assert caught.value.failure.param == param
    assert len(answer) < 1000


def test_limits_are_named(front: RunningFront):
    for num, num_choices in ((MAX_PROMPTS + 1, 1), (600, 2)):
        error = front.complete(["x"] * num, n=num_choices).json()["error"]
        assert error["param"] == "prompt" and f"{num} prompts" in error["message"] and "512" in error["message"]
    error = front.http.post("/v1/chat/completions", json=CHAT | {"messages": [USER] * (MAX_MESSAGES + 1)}).json()[
        "error"
    ]
    assert f"{MAX_MESSAGES + 1} messages" in error["message"] and str(MAX_MESSAGES) in error["message"]
    parts = [USER | {"content": [PART] * (MAX_PARTS // 2)}, USER | {"content": [PART] * (MAX_PARTS // 2 + 1)}]
    error = front.http.post("/v1/chat/completions", json=CHAT | {"messages": parts}).json()["error"]
    assert f"{MAX_PARTS + 1} parts" in error["message"] and str(MAX_PARTS) in error["message"]
    for nothing in (None, [], {}, [None]):
        error = front.complete(nothing).json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "invalid_value")
        assert "a text, its token ids, or a list of either" in error["message"]


def test_what_is_at_a_limit_works(front: RunningFront):
    assert len(front.complete(["x"] * MAX_PROMPTS, max_tokens=1).json()["choices"]) == MAX_PROMPTS
    every_token = {str(token): -100 for token in range(5, 400)}
    assert front.chat(logit_bias=every_token, max_tokens=1).status_code == 200
    tokens = [5] * MAX_SEQ_LEN
    assert front.http.post("/detokenize", json={"tokens": tokens}).status_code == 200
    refused = front.http.post("/detokenize", json={"tokens": [*tokens, 5]})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


def test_token_ids_beyond_the_context_are_refused_unread(front: RunningFront):
    """The id that is wrong is never looked at."""
    error = front.complete([5] * MAX_SEQ_LEN + [2**40]).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_a_clients_words_are_repeated_in_short(front: RunningFront):
    for fields in ({"model": "x" * 100_000}, {"x" * 100_000: 1}, {"a-b": 1}):
        answer = front.chat(**fields)
        assert answer.status_code in (400, 404) and len(answer.content) < 1000
    assert answer.json()["error"]["param"] == "a-b"
