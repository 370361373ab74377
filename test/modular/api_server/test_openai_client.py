"""The official client, unmodified: it parses everything, and raises its own errors."""

from collections.abc import Iterator

import openai
import pytest
from support.running_front import MODEL, RunningFront

from mstar.communication.messages import SamplingParams, TokenLogprobs

REPLY = " The capital of France is Paris.\n    indented 你好 😀 naïve."
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(front: RunningFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.base_url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, seed=1, user="me")
    assert answer.choices[0].message.content == REPLY and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, answer.choices[0].message, {"role": "user", "content": "and?"}]
    )
    assert again.choices[0].message.content == REPLY, "its own message objects go back in"


def test_chat_stream(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == REPLY
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


def test_the_stream_helper_assembles_the_answer(client: openai.OpenAI):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == REPLY


def test_completions(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=200, stop=["France"])
    assert [choice.text for choice in answer.choices] == [" The capital of "] * 2
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == REPLY


def test_logprobs(client: openai.OpenAI, front: RunningFront):
    def entry(token: int, settings: SamplingParams) -> TokenLogprobs:
        return TokenLogprobs(-0.5, (token, 60)[: settings.num_logprobs], (-0.5, -3.0)[: settings.num_logprobs])

    front.worker.logprobs = entry
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert bytes(byte for item in content for byte in item.bytes).decode() == REPLY
    assert content[0].top_logprobs[0].token == content[0].token
    legacy = client.completions.create(model=MODEL, prompt="a", logprobs=1, max_tokens=3).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.text_offset) == 3


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL, "org/tiny-alias"]
    assert client.models.retrieve("org/tiny-alias").id == "org/tiny-alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own(client: openai.OpenAI, front: RunningFront):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model=MODEL, prompt="x")
    front.call(front.parts.handle.begin_drain)
    try:
        with pytest.raises(openai.InternalServerError) as draining:
            client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert draining.value.status_code == 503 and draining.value.code == "server_shutting_down"
    finally:
        front.call(lambda: setattr(front.parts.handle, "is_draining", False))


def test_an_error_in_a_stream_is_raised(client: openai.OpenAI, front: RunningFront):
    front.worker.script = lambda _: iter(lambda: 300, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.01))
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    next(stream)
    rid = next(iter(front.worker.rows))
    front.call(lambda: front.worker.fail(rid, "logits are not finite"))
    with pytest.raises(openai.APIError, match="logits are not finite"):
        list(stream)


def test_with_streaming_off_a_failure_has_its_status(client: openai.OpenAI, front: RunningFront):
    def refuse(_: object) -> list[int]:
        rid = front.worker.received[-1].rid
        front.worker.fail(rid, "needs room for 900 tokens", 400)
        return []

    front.worker.script = refuse
    with pytest.raises(openai.BadRequestError, match="room for 900"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
