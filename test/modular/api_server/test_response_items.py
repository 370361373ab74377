"""Reasoning, calls and images as items of a response, and items that come back as the next turn."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.qwen3_5_front import data_url, image_bytes
from support.running_front import MODEL, RunningFront

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = "It wants the weather."
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\n%s\n</parameter>\n</function>\n</tool_call>"
ANSWER = f"{THOUGHT}\n</think>\n\nI ask.\n{CALL % 'Paris'}\n{CALL % 'Rome'}"


@pytest.fixture
def qwen(thinking: RunningFront) -> Iterator[RunningFront]:
    thinking.worker.logprobs = None
    thinking.reply(ANSWER)
    yield thinking
    thinking.wait_until(lambda: thinking.worker.num_open == 0)


@pytest.fixture
def client(qwen: RunningFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=qwen.base_url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def prompt_of(front: RunningFront) -> str:
    ids = front.openings()[-1].prompt_ids
    assert ids is not None
    return front.tokenizer.decode(memoryview(ids.data).cast("i").tolist(), skip_special_tokens=False)


def checked(response: Any) -> None:
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == THOUGHT and reasoning.summary == []
    assert message.content[0].text.strip() == "I ask."
    assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [
        ("function_call", "weather", {"city": city}) for city in ("Paris", "Rome")
    ]
    assert all(item.status == "completed" for item in response.output)
    assert len({item.id for item in response.output}) == 4 and len({call.call_id for call in calls}) == 2
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert response.tools[0].name == "weather"


def test_whole_and_streamed(client: openai.OpenAI):
    checked(client.responses.create(model=MODEL, input="hi", tools=[TOOL]))
    events = list(client.responses.create(model=MODEL, input="hi", tools=[TOOL], stream=True))
    assert events[-1].type == "response.completed"
    checked(events[-1].response)
    for kind in ("response.reasoning_text", "response.function_call_arguments"):
        done = [event for event in events if event.type == f"{kind}.done"]
        for end in done:
            deltas = [e.delta for e in events if e.type == f"{kind}.delta" and e.item_id == end.item_id]
            assert "".join(deltas) == (end.text if kind.endswith("text") else end.arguments)
        assert len(done) == (1 if kind.endswith("text") else 2)
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call", "function_call"]
    assert [e.output_index for e in events if e.type == "response.output_item.done"] == [0, 1, 2, 3]


def test_the_items_of_an_answer_are_one_turn_of_the_next_prompt(qwen: RunningFront, client: openai.OpenAI):
    first = client.responses.create(model=MODEL, input="hi", tools=[TOOL])
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    items = [{"role": "user", "content": "hi"}, *first.output, *outputs]  # its own objects, as the client sends them
    client.responses.create(model=MODEL, input=items, tools=[TOOL])
    through_items = prompt_of(qwen)
    message = {
        "role": "assistant",
        "content": first.output[1].content[0].text,
        "reasoning_content": THOUGHT,
        "tool_calls": [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }
    answers = [{"role": "tool", "tool_call_id": call.call_id, "content": "sunny"} for call in calls]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}, message, *answers],
        tools=[{"type": "function", "function": function}],
    )
    assert prompt_of(qwen) == through_items and "Rome" in through_items


def test_images(qwen: RunningFront, client: openai.OpenAI):
    picture = {"type": "input_image", "image_url": data_url(image_bytes()), "detail": "auto"}
    content = [{"type": "input_text", "text": "What is it?"}, picture]
    client.responses.create(model=MODEL, input=[{"role": "user", "content": content}])
    assert len(qwen.openings()[-1].media) == 1
    with pytest.raises(openai.BadRequestError) as caught:
        broken = {**picture, "image_url": "http://example.com/x.png"}
        client.responses.create(model=MODEL, input=[{"role": "user", "content": [broken]}])
    assert caught.value.param == "input[0].content[0].image_url"


def test_a_call_that_is_cut_is_incomplete(client: openai.OpenAI):
    whole = client.responses.create(model=MODEL, input="hi", tools=[TOOL])
    most = whole.usage.output_tokens - 12
    cut = client.responses.create(model=MODEL, input="hi", tools=[TOOL], max_output_tokens=most)
    assert cut.status == "incomplete" and cut.output[-1].status == "incomplete"
    assert [item.status for item in cut.output[:-1]] == ["completed"] * (len(cut.output) - 1)
