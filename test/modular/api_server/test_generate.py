"""`/generate`: typed events of whatever a model emits, whole or streamed."""

import json
from base64 import b64decode
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from support.running_front import MODEL, RunningFront, build_spec

from mstar.communication.host_tensors import from_numpy
from mstar.communication.messages import EmitFrame, SamplingParams, TokenLogprobs

REPLY = " The capital of France is Paris.\n    indented 你好 😀 naïve."


def generate(front: RunningFront, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **fields}
    if "messages" not in fields:
        body.setdefault("prompt", "hi")
    return front.http.post("/generate", json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_stream_prepares_says_and_finishes(front: RunningFront):
    events = events_of(generate(front, stream=True))
    first, *said, last = events
    num_prompt = len(front.tokenizer.encode("hi").ids)
    assert (first["type"], first["prompt_tokens"]) == ("prepared", num_prompt)
    assert {event["type"] for event in said} == {"text"}
    assert "".join(event["text"] for event in said) == REPLY
    assert [token for event in said for token in event["tokens"]] == front.tokenizer.encode(REPLY).ids
    assert (last["type"], last["choice"], last["finish_reason"]) == ("finished", 0, "stop")
    assert last["usage"]["prompt_tokens"] == num_prompt
    assert last["usage"]["completion_tokens"] == len(front.tokenizer.encode(REPLY).ids) + 1


def test_the_whole_is_the_stream_put_together(front: RunningFront):
    whole = generate(front, n=2, stop=["Paris"]).json()
    events = events_of(generate(front, n=2, stop=["Paris"], stream=True))
    for choice in whole["choices"]:
        own = [event for event in events if event.get("choice") == choice["index"]]
        assert choice["text"] == "".join(event.get("text", "") for event in own) == " The capital of France is "
        assert choice["tokens"] == [token for event in own for token in event.get("tokens", ())]
        assert choice["finish_reason"] == own[-1]["finish_reason"] == "stop"
        assert choice["tensors"] == [] and choice["logprobs"] is None
    finished = [event for event in events if event["type"] == "finished"]
    assert "usage" not in finished[0] and finished[1]["usage"] == whole["usage"]


def test_prompts_as_ids_and_as_a_conversation(front: RunningFront):
    ids = front.tokenizer.encode("hi").ids
    assert generate(front, prompt=ids).json()["usage"] == generate(front).json()["usage"]
    messages = [{"role": "user", "content": "hi"}]
    through_template = generate(front, messages=messages, max_tokens=3).json()
    assert through_template["usage"] == front.chat(max_tokens=3).json()["usage"]
    assert through_template["choices"][0]["finish_reason"] == "length"


def test_logprobs_are_by_id(front: RunningFront):
    def entry(token: int, settings: SamplingParams) -> TokenLogprobs:
        return TokenLogprobs(-0.5, (token, 60)[: settings.num_logprobs], (-0.5, -float("inf"))[: settings.num_logprobs])

    front.worker.logprobs = entry
    (choice,) = generate(front, logprobs=2, max_tokens=4).json()["choices"]
    assert [entry["token"] for entry in choice["logprobs"]] == choice["tokens"]
    assert choice["logprobs"][0]["top"][1] == {"token": 60, "logprob": -9999.0}
    streamed = events_of(generate(front, logprobs=2, max_tokens=4, stream=True))
    assert [entry for event in streamed for entry in event.get("logprobs", ())] == choice["logprobs"]


def test_tensors_have_dtype_shape_and_bytes(front: RunningFront):
    """A worker may emit any signal; a scripted one emits a picture before its text."""
    picture = np.arange(6, dtype=np.float32).reshape(2, 3)

    def script(opening: object) -> list[int]:
        rid = front.worker.received[-1].rid  # type: ignore[union-attr]
        frame = EmitFrame(
            src=0,
            rids=[],
            signals=[],
            tokens=[],
            tensor_rids=[rid],
            tensor_signals=["embedding"],
            tensors=[from_numpy(picture)],
        )
        front.worker.say(frame)
        return front.tokenizer.encode("hi").ids

    front.worker.script = script
    events = events_of(generate(front, stream=True))
    assert [event["type"] for event in events[:2]] == ["prepared", "tensor"]
    tensor = events[1]
    assert (tensor["signal"], tensor["modality"], tensor["dtype"], tensor["shape"]) == (
        "embedding",
        "embedding",
        "float32",
        [2, 3],
    )
    assert (np.frombuffer(b64decode(tensor["data"]), "<f4").reshape(2, 3) == picture).all()
    (choice,) = generate(front).json()["choices"]
    assert choice["text"] == "hi" and choice["tensors"][0]["data"] == tensor["data"]


def test_without_a_tokenizer_tokens_come_as_they_are(tmp_path):
    spec = build_spec(tmp_path)
    ids_only = replace(spec, setup=replace(spec.setup, tokenizer_dir=None))
    with RunningFront(ids_only, None, lambda _: (7, 8, 9)) as front:  # type: ignore[arg-type]
        events = events_of(generate(front, prompt=[5, 6], stream=True, max_tokens=3))
        tokens = [(event["signal"], event["token"]) for event in events[1:-1]]
        assert tokens == [("token", 7), ("token", 8), ("token", 9)]
        assert events[-1]["finish_reason"] == "length" and events[-1]["usage"]["completion_tokens"] == 3
        assert generate(front, prompt=[5, 6], max_tokens=3).json()["choices"][0]["tokens"] == [7, 8, 9]
        assert generate(front, prompt="hi").status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "y"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 300}, "max_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),
    ],
)
def test_what_is_refused_is_named(front: RunningFront, fields: dict[str, Any], param: str):
    answer = generate(front, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_an_error_in_a_stream_is_its_last_event(front: RunningFront):
    front.worker.script = lambda _: iter(lambda: 300, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.01))
    with front.http.stream("POST", "/generate", json={"model": MODEL, "prompt": "hi", "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        rid = next(iter(front.worker.rows))
        front.call(lambda: front.worker.fail(rid, "logits are not finite"))
        *_, name, data, _ = lines
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == "logits are not finite"


def test_a_client_that_leaves_ends_its_request(front: RunningFront):
    front.worker.script = lambda _: iter(lambda: 300, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.01))
    with front.http.stream("POST", "/generate", json={"model": MODEL, "prompt": "hi", "stream": True}) as stream:
        next(stream.iter_lines())
    front.wait_until(lambda: front.worker.num_open == 0)
