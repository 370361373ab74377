"""The synchronous client against a running server: answers, events, errors, and connections that close."""

import inspect
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest
from support.qwen3_5_front import image_bytes
from support.running_front import MAX_SEQ_LEN, MODEL, RunningFront

from mstar import client as package
from mstar.client import (
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    Client,
    ClientError,
    DeadlineError,
    Event,
    FinishEvent,
    NoAnswerError,
    NotFoundError,
    PreparedEvent,
    QueueFullError,
    ReasoningEvent,
    RequestAbortedError,
    StatusError,
    StreamError,
    TensorEvent,
    TextEvent,
    TokenEvent,
    TooLargeError,
    ToolCallEvent,
    UnavailableError,
    UnreadableAnswerError,
    UsageEvent,
    image_part,
    text_part,
)
from mstar.client.events import generate_events
from mstar.client.sse import EventSplitter, ServerEvent
from mstar.communication.host_tensors import from_numpy
from mstar.communication.messages import HostTensor, OpenRequest, SamplingParams, TokenLogprobs

KEY = "sesame"
REPLY = " The capital\u2028of France\u0085is Paris.\n    indented 你好 😀 naïve."
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture
def client(front: RunningFront) -> Iterator[Client]:
    with Client(front.base_url, api_key=KEY, timeout_s=20) as client:
        yield client


def endless(front: RunningFront) -> None:
    """From now on requests sample tokens for ever, a hundred a second."""
    token = front.tokenizer.encode("hi").ids[0]
    front.worker.script = lambda _: iter(lambda: token, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.01))


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent) and event.choice == choice)


def test_chat(client: Client):
    answer = client.chat("hi", temperature=0, n=2)
    assert answer.text == REPLY and answer.finish_reason == "stop" and answer.model == MODEL
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    turns = [{"role": "user", "content": "hi"}, answer.message.as_request(), {"role": "user", "content": "and?"}]
    longer = client.chat(turns, model="org/tiny-alias")
    assert longer.usage is not None and longer.usage.prompt_tokens > answer.usage.prompt_tokens
    assert longer.model == "org/tiny-alias"


def test_a_stream_of_a_chat(client: Client):
    with client.stream_chat("hi", n=2) as stream:
        assert stream.request_id
        events = list(stream)
    assert [text_of(events, choice) for choice in (0, 1)] == [REPLY, REPLY]
    assert len([event for event in events if isinstance(event, TextEvent)]) > 4, "it comes in pieces"
    ends = [event for event in events if isinstance(event, FinishEvent)]
    assert sorted((event.choice, event.reason) for event in ends) == [(0, "stop"), (1, "stop")]
    assert isinstance(events[-1], UsageEvent) and events[-1].usage.completion_tokens > 0


def test_completions(client: Client):
    answer = client.complete(["a", "b"], max_tokens=200, stop=["of"])
    assert [choice.text for choice in answer.choices] == [" The capital\u2028"] * 2
    events = list(client.stream_completion("a", max_tokens=5))
    assert text_of(events) and FinishEvent("length") in events


def test_logprobs(client: Client, front: RunningFront):
    def entry(token: int, settings: SamplingParams) -> TokenLogprobs:
        return TokenLogprobs(-0.5, (token, 60)[: settings.num_logprobs], (-0.5, -3.0)[: settings.num_logprobs])

    front.worker.logprobs = entry
    logprobs = client.chat("hi", logprobs=True, top_logprobs=2).choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(token.bytes or ()) for token in logprobs.content).decode() == REPLY
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -3.0]
    events = list(client.stream_chat("hi", logprobs=True))
    streamed = [event.logprobs.content for event in events if isinstance(event, TextEvent) and event.logprobs]
    assert sum(len(content or ()) for content in streamed) == len(logprobs.content)
    legacy = client.complete("a", logprobs=1, max_tokens=3).choices[0].logprobs
    assert legacy is not None and len(legacy.tokens) == len(legacy.token_logprobs) == 3


def test_generate(client: Client, front: RunningFront):
    ids = front.tokenizer.encode(REPLY).ids
    whole = client.generate("hi", n=2)
    assert [choice.text for choice in whole.choices] == [REPLY, REPLY] and whole.text == REPLY
    assert list(whole.choices[0].tokens) == ids and whole.choices[1].finish_reason == "stop"
    assert client.generate(front.tokenizer.encode("hi").ids).usage.prompt_tokens == whole.usage.prompt_tokens
    talked = client.generate(messages="hi", max_tokens=3)
    assert talked.usage.prompt_tokens == client.chat("hi", max_tokens=3).usage.prompt_tokens
    prepared, *events = list(client.stream_generate("hi", n=2))
    assert isinstance(prepared, PreparedEvent) and prepared.prompt_tokens == len(front.tokenizer.encode("hi").ids)
    assert text_of(events, 0) == text_of(events, 1) == REPLY
    said = [event for event in events if isinstance(event, TextEvent) and event.choice == 0]
    assert [token for event in said for token in event.tokens] == ids
    assert events[-1] == UsageEvent(whole.usage)
    ends = [event for event in events if isinstance(event, FinishEvent)]
    assert sorted((event.choice, event.reason) for event in ends) == [(0, "stop"), (1, "stop")]
    with pytest.raises(BadRequestError, match="either prompt or messages"):
        client.generate("hi", messages="hi")


def test_generate_with_logprobs_and_tensors(client: Client, front: RunningFront):
    def entry(token: int, settings: SamplingParams) -> TokenLogprobs:
        return TokenLogprobs(-0.5, (token, 60)[: settings.num_logprobs], (-0.5, -3.0)[: settings.num_logprobs])

    front.worker.logprobs = entry
    (choice,) = client.generate("hi", logprobs=2, max_tokens=3).choices
    assert choice.logprobs is not None and [note.token for note in choice.logprobs] == list(choice.tokens)
    assert [(top.token, top.logprob) for top in choice.logprobs[0].top][1] == (60, -3.0)
    assert generate_events(
        b'{"type":"tensor","choice":1,"signal":"image","modality":"image","dtype":"uint8","shape":[2],"data":"AQI="}'
    ) == [TensorEvent("image", "image", "uint8", (2,), b"\x01\x02", 1)]
    assert generate_events(b'{"type":"token","choice":0,"signal":"code","token":7}') == [TokenEvent("code", 7)]


def test_embeddings(client: Client, front: RunningFront):
    vectors = {1: (0.5, -0.25, 1e-7), 2: (1.0, 0.0, -3.5)}

    def by_length(opening: OpenRequest) -> HostTensor:
        assert opening.prompt_ids is not None
        return from_numpy(np.array(vectors[min(opening.prompt_ids.shape[0], 2)], np.float32))

    front.worker.embedding = by_length
    answer = client.embed([[5], [5, 6, 7], [5]])
    assert [np.float32(vector).tolist() for vector in answer.vectors] == [
        np.float32(vectors[length]).tolist() for length in (1, 2, 1)
    ]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (MODEL, 5, 0)
    assert len(client.embed("a text").vectors) == 1
    with pytest.raises(BadRequestError) as bad:
        client.embed("a text", dimensions=1)
    assert bad.value.param == "dimensions"
    embedding = client.models()[0].embedding_size
    assert embedding is not None and embedding > 1


def test_tokens_and_models(client: Client, front: RunningFront):
    tokens = client.tokenize("naïve 😀")
    assert tokens == front.tokenizer.encode("naïve 😀").ids
    assert client.detokenize(tokens) == "naïve 😀"
    assert len(client.tokenize(messages="naïve 😀")) > len(tokens)
    first, alias = client.models()
    assert (first.id, first.max_model_len) == (MODEL, MAX_SEQ_LEN) and "/v1/chat/completions" in first.endpoints
    assert client.model("org/tiny-alias").root == MODEL == alias.root
    assert (client.health(), client.ready()) == ("healthy", "ready")


def test_reasoning_and_tool_calls(thinking: RunningFront):
    thinking.reply(f"to think\n</think>\n\nLooking.\n{CALL}")
    question = [{"role": "user", "content": [text_part("What is this?"), image_part(image_bytes())]}]
    with Client(thinking.base_url) as client:
        answer = client.chat(question, tools=[WEATHER])
        message = answer.message
        assert (message.reasoning_content, message.content) == ("to think", "Looking.")
        assert message.tool_calls[0].function.name == "weather" and message.tool_calls[0].arguments() == {
            "city": "Paris"
        }
        assert answer.finish_reason == "tool_calls"
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        events = list(client.stream_chat(question, tools=[WEATHER]))
        assert "".join(event.text for event in events if isinstance(event, ReasoningEvent)) == "to think"
        calls = [event for event in events if isinstance(event, ToolCallEvent)]
        assert calls[0].name == "weather" and calls[0].id
        assert "".join(event.arguments for event in calls) == message.tool_calls[0].function.arguments
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        again = client.chat([*question, message.as_request(), result], tools=[WEATHER])
        assert answer.usage.prompt_tokens < again.usage.prompt_tokens


def test_errors_have_a_class_by_status_and_say_what_the_server_said(client: Client, front: RunningFront):
    with pytest.raises(BadRequestError, match=r"400: .*temperature") as bad:
        client.chat("hi", temperature=3)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert bad.value.request_id
    with pytest.raises(BadRequestError) as unknown:
        client.stream_chat("hi", no_such_field=1).__enter__()
    assert unknown.value.code == "unknown_parameter"
    with pytest.raises(NotFoundError) as missing:
        client.chat("hi", model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(TooLargeError):
        client.chat("x" * 30_000)
    with Client(front.base_url, api_key="wrong") as stranger, pytest.raises(AuthenticationError):
        stranger.chat("hi")
    front.call(front.parts.handle.begin_drain)
    try:
        with pytest.raises(UnavailableError) as draining:
            client.chat("hi")
        assert (draining.value.status, draining.value.code) == (503, "server_shutting_down")
    finally:
        front.call(lambda: setattr(front.parts.handle, "is_draining", False))


def test_deadlines_and_aborts(client: Client, front: RunningFront):
    endless(front)
    with pytest.raises(DeadlineError):
        client.chat("hi", ignore_eos=True, timeout=0.1)
    with client.stream_chat("hi") as stream:
        assert stream.request_id is not None
        assert client.abort(stream.request_id) == 1
        with pytest.raises(StreamError) as aborted:
            list(stream)
    assert aborted.value.code == "request_aborted"
    assert issubclass(RequestAbortedError, StatusError)
    with pytest.raises(NotFoundError):
        client.abort("nobody/?")


def test_an_error_in_a_stream_is_raised(client: Client, front: RunningFront):
    endless(front)
    with client.stream_chat("hi") as stream, pytest.raises(StreamError, match="logits are not finite") as failed:
        for event in stream:
            assert isinstance(event, TextEvent)
            rid = next(iter(front.worker.rows))
            front.call(lambda rid=rid: front.worker.fail(rid, "logits are not finite"))
    assert failed.value.request_id == stream.request_id


def test_leaving_a_stream_ends_the_request(client: Client, front: RunningFront):
    endless(front)
    for _ in client.stream_chat("hi"):
        assert front.worker.num_open == 1
        break
    front.wait_until(lambda: front.worker.num_open == 0)
    with client.stream_chat("hi") as stream:
        next(iter(stream))
    front.wait_until(lambda: front.worker.num_open == 0)
    front.reply(REPLY)
    assert client.chat("hi").text == REPLY


def test_where_nobody_answers():
    with Client("http://127.0.0.1:9", timeout_s=5) as client, pytest.raises(NoAnswerError, match=r"127\.0\.0\.1:9"):
        client.chat("hi")


@contextmanager
def answering(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, the last one again and again: its URL, and the bodies that it was sent."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            status, headers, body = answers[min(len(bodies), len(answers)) - 1]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        server.shutdown()
        thread.join()


BUSY = b'{"error":{"message":"too many","type":"rate_limit_error","param":null,"code":"queue_full"}}'
ANSWER = b'{"id":"x","model":"m","choices":[{"index":0,"text":"ok"}],"new_field":{}}'


def test_a_full_queue_is_not_asked_again_unless_that_is_wanted():
    with answering((429, {"retry-after": "0"}, BUSY), (200, {}, ANSWER)) as (url, bodies):
        with Client(url) as client, pytest.raises(QueueFullError) as busy:
            client.complete("a", model="m")
        assert busy.value.retry_after_s == 0 and len(bodies) == 1


def test_repetitions_wait_as_told_and_end():
    with answering((429, {"retry-after": "1"}, BUSY), (503, {"retry-after": "0"}, b"<html>"), (200, {}, ANSWER)) as at:
        url, bodies = at
        with Client(url, max_retries=2) as client:
            assert client.complete("a", model="m").text == "ok"
        assert len(bodies) == 3 and bodies[0] == bodies[2]
    with answering((429, {"retry-after": "0"}, BUSY)) as (url, bodies), Client(url, max_retries=2) as client:
        with pytest.raises(QueueFullError):
            client.stream_completion("a", model="m").__enter__()
        assert len(bodies) == 3
    with answering((429, {"retry-after": "3600"}, BUSY)) as (url, bodies), Client(url, max_retries=2) as client:
        with pytest.raises(QueueFullError):
            client.complete("a", model="m")
        assert len(bodies) == 1, "so long nobody waits"
    with answering((504, {}, BUSY)) as (url, bodies), Client(url, max_retries=2) as client:
        with pytest.raises(DeadlineError):
            client.complete("a", model="m")
        assert len(bodies) == 1


@pytest.mark.parametrize(
    "body", [b"", b'data: {"choices":[]}\n\n', b"data: [DONE", b"data: {}\n\n", b"event: error\ndata: x\n\n"]
)
def test_a_stream_that_is_none_is_an_error(body: bytes):
    kind = {"content-type": "text/event-stream"}
    with (
        answering((200, kind, body)) as (url, _),
        Client(url) as client,
        pytest.raises(UnreadableAnswerError),
    ):
        list(client.stream_chat("hi", model="m"))


@pytest.mark.parametrize("text", ["AAA", "AAAA", "é"])
def test_an_embedding_that_is_none_is_an_error(text: str):
    entry = f'{{"index":0,"embedding":"{text}"}}'
    body = f'{{"data":[{entry}],"model":"m","usage":{{"prompt_tokens":1,"total_tokens":1}}}}'.encode()
    with answering((200, {}, body)) as (url, _), Client(url) as client, pytest.raises(UnreadableAnswerError):
        client.embed("hi", model="m")


def test_an_answer_that_is_none_is_an_error():
    with answering((200, {}, b"<html>")) as (url, _), Client(url) as client, pytest.raises(UnreadableAnswerError):
        client.chat("hi", model="m")
    with answering((418, {}, b"<html>")) as (url, _), Client(url) as client, pytest.raises(StatusError, match="418"):
        client.chat("hi", model="m")


def test_events_may_be_cut_anywhere():
    body = 'event: error\ndata: {"a":\ndata: 1}\n\n: a comment\n\ndata: é\u2028\n\ndata:tight\n\n'.encode()
    whole = [ServerEvent("error", b'{"a":\n1}'), ServerEvent("", "é\u2028".encode()), ServerEvent("", b"tight")]
    for size in (1, 2, 7, 100):
        splitter = EventSplitter()
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        assert [event for piece in pieces for event in splitter.feed(piece)] == whole


def test_both_clients_have_the_same_methods():
    def methods(kind: type) -> dict[str, str]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: re.sub(r"Async", "", str(inspect.signature(function))) for name, function in found if name[0] != "_"
        }

    assert methods(Client) == methods(AsyncClient)
    assert str(inspect.signature(Client)) == str(inspect.signature(AsyncClient))


def test_every_error_is_a_client_error_and_everything_exported_exists():
    errors = [getattr(package, name) for name in package.__all__ if name.endswith("Error")]
    assert len(errors) > 10 and all(issubclass(error, ClientError) for error in errors)
