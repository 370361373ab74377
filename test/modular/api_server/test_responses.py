"""`/v1/responses`: items in and out, typed events, and what is refused, in the words of this route."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.running_front import MODEL, RunningFront

from mstar.communication.messages import SamplingParams, TokenLogprobs

REPLY = " The capital of France is Paris.\n    indented 你好 😀 naïve."


@pytest.fixture
def client(front: RunningFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.base_url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def message(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}


def respond(front: RunningFront, given: Any = "hi", **fields: Any) -> httpx.Response:
    return front.http.post("/v1/responses", json={"model": MODEL, "input": given, **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Strict: an event's name is its type, numbers go up by one, and nothing else is sent."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, event in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        parsed = json.loads(data.removeprefix("data: "))
        assert name == f"event: {parsed['type']}" and parsed["sequence_number"] == number
        events.append(parsed)
    return events


def prompt_of(front: RunningFront) -> str:
    ids = front.openings()[-1].prompt_ids
    assert ids is not None
    return front.tokenizer.decode(memoryview(ids.data).cast("i").tolist(), skip_special_tokens=False)


def test_a_response(client: openai.OpenAI):
    answer = client.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", temperature=0, metadata={"a": "b"}
    )
    assert answer.output_text == REPLY and answer.status == "completed" and answer.error is None
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0)
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens > 1
    assert usage.input_tokens_details.cached_tokens == usage.output_tokens_details.reasoning_tokens == 0


def test_items_become_the_conversation(front: RunningFront, client: openai.OpenAI):
    first = client.responses.create(model=MODEL, input=[{"role": "user", "content": "hi"}])
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]},
        *(item.model_dump() for item in first.output),
        {"type": "message", "role": "user", "content": "and?"},
    ]
    client.responses.create(model=MODEL, input=items, instructions="Be brief.")
    through_items = prompt_of(front)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": REPLY},
        {"role": "user", "content": "and?"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    assert prompt_of(front) == through_items


def test_a_stream_tells_of_every_item_and_ends_with_the_response(front: RunningFront):
    whole = respond(front).json()
    events = events_of(respond(front, stream=True))
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[4 : 4 + len(deltas)] == ["response.output_text.delta"] * len(deltas)
    assert kinds[4 + len(deltas) :] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in deltas) == REPLY == events[-4]["text"]
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]] and last["usage"] == whole["usage"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    ids = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in last.items() if k not in ids} == {k: v for k, v in whole.items() if k not in ids}


def test_the_clients_stream_helper_assembles_the_response(client: openai.OpenAI):
    with client.responses.stream(model=MODEL, input="hi") as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == REPLY
        assert stream.get_final_response().output_text == REPLY


@pytest.mark.parametrize("streamed", [False, True])
def test_a_limit_leaves_it_incomplete(front: RunningFront, streamed: bool):
    answer = respond(front, max_output_tokens=3, stream=streamed)
    response = events_of(answer)[-1]["response"] if streamed else answer.json()
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"} and response["max_output_tokens"] == 3
    assert response["usage"]["output_tokens"] == 3


def test_an_answer_without_a_word_is_an_empty_message(front: RunningFront):
    front.reply("")
    (message,) = respond(front).json()["output"]
    assert message["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs(front: RunningFront, streamed: bool):
    def entry(token: int, settings: SamplingParams) -> TokenLogprobs:
        return TokenLogprobs(-0.5, (token, 60)[: settings.num_logprobs], (-0.5, -3.0)[: settings.num_logprobs])

    front.worker.logprobs = entry
    answer = respond(front, top_logprobs=2, stream=streamed)
    response = events_of(answer)[-1]["response"] if streamed else answer.json()
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for item in logprobs for byte in item["bytes"]).decode() == REPLY
    assert len(logprobs[0]["top_logprobs"]) == 2 == response["top_logprobs"]
    if streamed:
        deltas = [event for event in events_of(answer) if event["type"] == "response.output_text.delta"]
        assert [item for event in deltas for item in event["logprobs"]] == logprobs
    included = respond(front, include=["message.output_text.logprobs"], max_output_tokens=1).json()
    assert included["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


def test_sampling_fields_reach_the_worker(front: RunningFront):
    assert respond(front, top_k=3, seed=7, stop=["France"], priority=-2, max_output_tokens=90).status_code == 200
    opening = front.openings()[-1]
    assert (opening.sampling.top_k, opening.sampling.max_tokens, opening.priority) == (3, 90, -2)
    assert respond(front, stop=["France"]).json()["output"][0]["content"][0]["text"] == " The capital of "


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [message({"type": "input_file", "file_id": "x"})]}, "input[0].content[0].type"),
        ({"input": [message({"type": "input_image", "image_url": "data:,AA"})]}, "input[0].content[0].type"),
        ({"input": [message(), CALL]}, "input[1].arguments"),
        ({"input": ["x", CALL]}, "input"),
        ({"input": "a " * 400}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 255}, "max_output_tokens"),
        ({"min_tokens": 9, "max_output_tokens": 8}, "min_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"conversation": "c"}, "conversation"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ],
)
def test_what_is_refused_is_named_as_it_was_sent(front: RunningFront, fields: dict[str, Any], param: str):
    answer = front.http.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
    assert "messages" not in error["message"] and "completion" not in error["message"]


def test_neutral_values_are_taken(front: RunningFront):
    neutral = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {},
        "text": {"format": {"type": "text"}},
        "tools": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "stream_options": {"include_obfuscation": False},
        "user": "me",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    assert respond(front, **neutral).json()["output"][0]["content"][0]["text"] == REPLY


def test_an_error_in_a_stream_is_its_last_event(front: RunningFront, client: openai.OpenAI):
    front.worker.script = lambda _: iter(lambda: 300, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.01))
    stream = client.responses.create(model=MODEL, input="hi", stream=True)
    assert next(stream).type == "response.created"
    rid = next(iter(front.worker.rows))
    front.call(lambda: front.worker.fail(rid, "logits are not finite"))
    with pytest.raises(openai.APIError, match="logits are not finite"):
        list(stream)


def test_a_client_that_leaves_and_one_that_cancels(front: RunningFront):
    front.worker.script = lambda _: iter(lambda: 300, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.01))
    with front.http.stream("POST", "/v1/responses", json={"model": MODEL, "input": "hi", "stream": True}) as stream:
        next(stream.iter_lines())
    front.wait_until(lambda: front.worker.num_open == 0)
    body = {"model": MODEL, "input": "hi", "stream": True}
    with front.http.stream("POST", "/v1/responses", json=body, headers={"x-request-id": "mine"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert front.http.delete("/v1/requests/mine").status_code == 200
        assert any("request_aborted" in line for line in lines)
