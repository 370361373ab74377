"""The official client, unmodified, against a running server of a tiny Qwen3.5 with its vision tower, random weights."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from support.qwen3_5_front import data_url
from support.qwen3_5_media import picture
from support.qwen3_5_server import NAME, ServedQwen
from support.server import Server

from mstar.model.base import PromptRequest

QUESTION: Any = [{"role": "user", "content": "What is this?"}]
NO_THOUGHT: Any = {"chat_template_kwargs": {"enable_thinking": False}}


def shown(seed: int) -> Any:
    """A question about a picture."""
    image = {"type": "image_url", "image_url": {"url": data_url(picture(64, 48, seed))}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> ServedQwen:
    return ServedQwen(tmp_path_factory.mktemp("tiny"), "tiny")


@pytest.fixture(scope="module")
def _server(qwen: ServedQwen, tmp_path_factory) -> Iterator[Server]:
    with qwen.serving(tmp_path_factory.mktemp("log") / "log") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    yield _server
    _server.wait_for(_server.is_idle, 3, "everything given back")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_chat_with_pictures_whole_and_streamed(client: openai.OpenAI):
    asked: Any = {"model": NAME, "temperature": 0, "max_tokens": 10, "extra_body": NO_THOUGHT}
    first, second, without = (
        client.chat.completions.create(messages=messages, **asked) for messages in (shown(1), shown(2), QUESTION)
    )
    assert first.choices[0].finish_reason in ("length", "stop") and first.usage and without.usage
    assert first.usage.prompt_tokens > without.usage.prompt_tokens
    assert first.choices[0].message.content != second.choices[0].message.content, "the picture decides"
    chunks = list(client.chat.completions.create(messages=shown(1), **asked, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == first.choices[0].message.content
    again = client.chat.completions.create(messages=shown(1), **asked)
    assert again.choices[0].message.content == text


def test_reasoning_is_apart_and_counted(client: openai.OpenAI):
    asked: Any = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 6}
    answer = client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert answer.usage and answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 6
    thought = getattr(answer.choices[0].message, "reasoning_content", "")
    assert thought and not answer.choices[0].message.content
    response = client.responses.create(
        model=NAME,
        input="What is this?",
        temperature=0,
        max_output_tokens=6,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    (item,) = response.output
    assert item.type == "reasoning" and item.content and item.content[0].text == thought
    assert response.status == item.status == "incomplete"


def test_n_seed_logprobs_and_stop(client: openai.OpenAI):
    asked: Any = {"model": NAME, "messages": shown(3), "max_tokens": 8, "extra_body": NO_THOUGHT}
    drawn = client.chat.completions.create(**asked, n=3, seed=5, temperature=1.5, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in drawn.choices]
    assert len(set(texts)) == 3
    for choice in drawn.choices:
        assert choice.logprobs and choice.logprobs.content
        assert bytes(b for entry in choice.logprobs.content for b in entry.bytes or ()).decode(errors="ignore")
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)
    again = client.chat.completions.create(**asked, n=3, seed=5, temperature=1.5)
    assert [choice.message.content for choice in again.choices] == texts
    plain = client.chat.completions.create(**asked, temperature=0).choices[0].message.content
    assert plain
    stop = plain[len(plain) // 2 :][:3]
    cut = client.chat.completions.create(**asked, temperature=0, stop=stop).choices[0]
    assert cut.finish_reason == "stop" and cut.message.content == plain[: plain.index(stop)]


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 99}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "hotels")
]


def checked_call(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    assert name in ("weather", "hotels") and values.keys() == {"city", "days"}
    assert values["city"] in ("Paris", "Rome") and isinstance(values["days"], int)


def test_calls_can_be_required_whole_and_streamed(client: openai.OpenAI):
    """Random weights would never call anything by themselves."""
    asked: Any = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "max_tokens": 400, "extra_body": NO_THOUGHT}
    required = client.chat.completions.create(
        **asked, tool_choice="required", parallel_tool_calls=False, seed=2, temperature=1
    )
    (choice,) = required.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls and len(choice.message.tool_calls) == 1
    call: Any = choice.message.tool_calls[0]
    checked_call(call.function.name, call.function.arguments)
    chunks = client.chat.completions.create(
        **asked, tool_choice="required", parallel_tool_calls=False, seed=2, temperature=1, stream=True
    )
    deltas = [delta for chunk in chunks for c in chunk.choices for delta in c.delta.tool_calls or ()]
    assert "".join(d.function.name or "" for d in deltas if d.function) == call.function.name
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == call.function.arguments
    named: Any = {"type": "function", "function": {"name": "hotels"}}
    for seed in range(3):
        one = client.chat.completions.create(**asked, tool_choice=named, seed=seed, temperature=1)
        (called,) = one.choices[0].message.tool_calls or ()
        assert called.function.name == "hotels"  # type: ignore[union-attr]
        checked_call(called.function.name, called.function.arguments)  # type: ignore[union-attr]


def test_calls_in_responses(client: openai.OpenAI):
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = client.responses.create(
        model=NAME,
        input="What is this?",
        tools=tools,
        tool_choice={"type": "function", "name": "weather"},
        temperature=1,
        extra_body={**NO_THOUGHT, "seed": 4},
        max_output_tokens=400,
    )
    (item,) = response.output
    assert item.type == "function_call" and item.name == "weather"
    checked_call(item.name, item.arguments)


def test_responses_with_pictures(client: openai.OpenAI):
    content: Any = [
        {"type": "input_image", "image_url": data_url(picture(64, 48, 1)), "detail": "auto"},
        {"type": "input_text", "text": "What is this?"},
    ]
    fields: Any = {"model": NAME, "temperature": 0, "extra_body": NO_THOUGHT}
    response = client.responses.create(input=[{"role": "user", "content": content}], max_output_tokens=10, **fields)
    chat = client.chat.completions.create(messages=shown(1), max_tokens=10, **fields)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage and chat.usage and response.usage.input_tokens == chat.usage.prompt_tokens


def test_embeddings_are_the_models(client: openai.OpenAI, qwen: ServedQwen):
    texts = ["The sea is calm.", "one two three four five " * 30]
    answer = client.embeddings.create(model=NAME, input=texts)
    for text, entry in zip(texts, answer.data, strict=True):
        ids = qwen.model.process_prompt(PromptRequest("embedding", text=text)).token_ids
        with torch.no_grad():
            body = qwen.reference.model.model.language_model
            hidden = body(torch.tensor(ids[None], dtype=torch.int64)).last_hidden_state[0, -1]
        assert float(torch.tensor(entry.embedding) @ (hidden / hidden.norm())) > 1 - 1e-4
    assert answer.usage.prompt_tokens == sum(map(qwen.count, texts))


def test_what_is_thought_is_not_constrained(client: openai.OpenAI, server: Server):
    asked: Any = {"model": NAME, "messages": QUESTION, "temperature": 1, "max_tokens": 40}
    (end,) = httpx.post(server.url + "/tokenize", json={"model": NAME, "prompt": "</think>"}).json()["tokens"]
    body: Any = {"guided_choice": ["yes", "no"], "chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(**asked, logit_bias={str(end): 9}, extra_body=body, seed=1).choices[0]
    assert answer.message.content in ("yes", "no") and answer.finish_reason == "stop"
    body["chat_template_kwargs"] = {"enable_thinking": False}
    answer = client.chat.completions.create(**asked, extra_body=body).choices[0]
    assert answer.message.content in ("yes", "no")


def test_errors_have_the_right_class_and_field(client: openai.OpenAI):
    def raised(messages: Any, **fields: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=NAME, messages=messages, **fields)
        return caught.value

    broken = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    elsewhere = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]
    assert raised(broken).param == "messages"
    assert raised(elsewhere).param == "messages[0].content[0].image_url.url"
    unread: Any = {"chat_template_kwargs": {"no_such_variable": 1}}
    assert raised(QUESTION, extra_body=unread).param == "chat_template_kwargs"
    assert raised([{"role": "user", "content": "word " * 4000}]).code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model=NAME, prompt="a sea")


def test_models(client: openai.OpenAI):
    facts: Any = client.models.retrieve(NAME).model_dump()
    assert facts["modalities"]["input"] == ["text", "image", "video"]
    assert facts["capabilities"]["reasoning"] and facts["capabilities"]["tool_calls"]
