"""The official client, unmodified, against a running server of the embedded model: what it asks for is what it gets."""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema_rs
import numpy as np
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from support.server import Server, running
from support.smollm2_reference import Smollm2Reference

pytestmark = pytest.mark.network
MODEL = "smollm2"
LIMIT = 512
KEY = "sk-of-the-test"
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story."}]
COUNTING = "one two three four five six seven eight nine ten"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.fixture(scope="module")
def reference() -> Smollm2Reference:
    return Smollm2Reference()


@pytest.fixture(scope="module")
def _server(tmp_path_factory) -> Iterator[Server]:
    settings = {"max_seq_len": LIMIT, "server.api_keys": f"[{KEY}]", "num_threads": 1}
    settings |= {"scheduler.max_rows": 8, "scheduler.max_queue": 8}
    arguments = [MODEL, *(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))]
    with running(arguments, tmp_path_factory.mktemp("log") / "log") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    yield _server
    _server.wait_for(_server.is_idle, 3, "everything given back")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_chat_whole_and_streamed(client: openai.OpenAI):
    asked: Any = {"model": MODEL, "messages": FRANCE, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop" and whole.model == MODEL
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


def test_usage_counts_the_prompt_and_the_end_token(client: openai.OpenAI, reference: Smollm2Reference):
    answer = client.completions.create(model=MODEL, prompt=COUNTING, max_tokens=5, temperature=0)
    assert answer.usage is not None and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(reference.encode(COUNTING)), 5)
    chat = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == len(reference.encode("The capital of France is Paris.")) + 1


def test_logprobs(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=COUNTING, max_tokens=3, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for token, own, top in zip(logprobs.tokens, logprobs.token_logprobs or (), logprobs.top_logprobs, strict=True):
        assert own == top[token] == max(top.values()) <= 0 and sum(map(math.exp, top.values())) <= 1
    chat = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    entries = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == chat.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries), "greedy takes the likeliest"


def test_n_and_seed(client: openai.OpenAI):
    asked: Any = {"model": MODEL, "messages": STORY, "n": 4, "seed": 7, "max_tokens": 12, "temperature": 1}
    first = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    again = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in again.choices] == texts
    streamed: dict[int, str] = dict.fromkeys(range(4), "")
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts
    assert first.usage is not None and first.usage.completion_tokens <= 4 * 12


def test_stop_and_echo(client: openai.OpenAI):
    plain: Any = {"model": MODEL, "messages": FRANCE, "temperature": 0}
    answer = client.chat.completions.create(**plain, stop=["France is", "nowhere"])
    assert answer.choices[0].message.content == "The capital of " and answer.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(**plain, stop="Paris", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == "The capital of France is "
    echoed = client.completions.create(model=MODEL, prompt=COUNTING, echo=True, max_tokens=2, temperature=0)
    silent = client.completions.create(model=MODEL, prompt=COUNTING, max_tokens=2, temperature=0)
    assert echoed.choices[0].text == COUNTING + silent.choices[0].text


def test_guided_texts_whole_and_streamed(client: openai.OpenAI):
    choice: Any = {"guided_choice": ["blue", "green with envy"]}
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=2, seed=3, extra_body=choice)
    assert answer.choices[0].message.content in choice["guided_choice"] and answer.choices[0].finish_reason == "stop"
    number: Any = {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}
    chunks = client.completions.create(model=MODEL, prompt="Code:", stream=True, temperature=2, extra_body=number)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)
    grammar: Any = {"guided_grammar": 'root ::= "(" root ")" | "x"'}
    text = client.completions.create(model=MODEL, prompt="((", max_tokens=60, extra_body=grammar).choices[0].text
    assert re.fullmatch(r"\(*(x\)*)?", text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "[a-z"}, "guided_regex"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_grammar_is_a_400_that_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=FRANCE, extra_body=fields, stream=stream)
    assert raised.value.param == param


def test_responses(client: openai.OpenAI):
    answer = client.responses.create(model=MODEL, input=FRANCE[0]["content"], temperature=0)
    assert answer.output_text == "The capital of France is Paris." and answer.status == "completed"
    events = list(client.responses.create(model=MODEL, input=FRANCE, temperature=0, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    with client.responses.stream(model=MODEL, input=FRANCE, temperature=0) as stream:
        assert stream.get_final_response().output_text == answer.output_text
    turn: Any = [*FRANCE, *answer.output, {"role": "user", "content": "And of Italy?"}]
    following = client.responses.create(model=MODEL, input=turn, temperature=0, max_output_tokens=30)
    assert following.usage is not None and answer.usage is not None
    assert following.usage.input_tokens > answer.usage.total_tokens
    cut = client.responses.create(model=MODEL, input=STORY, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_embeddings(client: openai.OpenAI, reference: Smollm2Reference):
    texts = ["The cat sleeps on the sofa.", "A cat is asleep on a couch.", "Interest rates rose again.", COUNTING * 8]
    answer = client.embeddings.create(model=MODEL, input=texts)
    vectors = np.array([entry.embedding for entry in answer.data])
    assert vectors.shape == (4, 576)
    cosines = vectors @ vectors.T
    assert np.abs(cosines.diagonal() - 1).max() < 1e-5 and cosines[0, 1] > cosines[0, 2]
    plain = client.embeddings.create(model=MODEL, input=reference.encode(texts[3]), encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(vectors[3].tolist(), abs=1e-2)
    num_tokens = sum(len(reference.encode(text)) for text in texts)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens


class Person(BaseModel):
    """What the model is asked to write."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]
    likes: Annotated[list[Literal["tea", "coffee"]], Field(max_length=2)]


def test_structured_output_is_valid_at_any_temperature(client: openai.OpenAI):
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Make up a person, as JSON."}]}
    for temperature in (0, 2):
        parsed = client.chat.completions.parse(
            **asked, response_format=Person, temperature=temperature, n=3, seed=1, max_tokens=200
        )
        for choice in parsed.choices:
            assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)
    response = client.responses.parse(
        model=MODEL, input="Make up a person, as JSON.", text_format=Person, temperature=2
    )
    assert isinstance(response.output_parsed, Person)
    anything = client.chat.completions.create(**asked, response_format={"type": "json_object"}, max_tokens=150)
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)
    chosen = client.completions.create(
        model=MODEL, prompt="Red or blue?", temperature=2, extra_body={"guided_choice": ["red", "blue"]}
    )
    assert chosen.choices[0].text in ("red", "blue")
    with pytest.raises(openai.BadRequestError) as caught:
        wrong: Any = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
        client.responses.create(model=MODEL, input="x", text={"format": wrong})
    assert caught.value.param is not None and caught.value.param.startswith("text.format")


def awkward_schemas() -> dict[str, tuple[Any, bool]]:
    """Each with whether some text has such a form."""
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    pair = {"type": "array", "items": [{"type": "boolean"}, {"type": "null"}], "minItems": 2, "$schema": DRAFT_7}
    words = "|".join(f"word{index}x[0-9]{{1,30}}" for index in range(200))
    return {
        "good": ({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}, True),
        "deep": (deep, False),
        "endless": ({"$ref": "#/$defs/node", "$defs": {"node": node}}, True),
        "tuple": (pair, True),
        "large regex": ({"type": "string", "pattern": f"^({words})$"}, True),
        "huge regex": ({"type": "string", "pattern": "a|" * 9000 + "b"}, False),
        "impossible": ({"type": "string", "pattern": "^a$b"}, False),
        "nothing between": ({"type": "integer", "minimum": 5, "maximum": 3}, False),
    }


def test_awkward_schemas_are_valid_or_refused_and_nobody_else_notices(client: openai.OpenAI):
    """C2."""
    asked: Any = {"model": MODEL, "messages": STORY, "temperature": 0, "extra_body": {"ignore_eos": True}}
    alone = client.chat.completions.create(**asked, max_tokens=80).choices[0].message.content
    stream = client.chat.completions.create(**asked, max_tokens=80, stream=True)
    for name, (schema, is_possible) in awkward_schemas().items():
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        form: Any = {"model": MODEL, "messages": STORY, "response_format": wanted, "seed": 1, "max_tokens": 40}
        if not is_possible:
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**form)
            assert caught.value.param == "response_format", name
            continue
        choice = client.chat.completions.create(**form).choices[0]
        assert choice.finish_reason == ("length" if name == "endless" else "stop"), name
        if choice.finish_reason == "stop":
            assert jsonschema_rs.is_valid(schema, json.loads(choice.message.content or "")), name
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == alone


def test_models(client: openai.OpenAI):
    (model,) = [entry for entry in client.models.list() if entry.id == MODEL]
    facts: Any = client.models.retrieve(MODEL).model_dump()
    assert model.id == facts["id"] and facts["max_model_len"] == LIMIT and facts["embedding_size"] == 576
    assert {"/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/generate"} <= set(facts["endpoints"])
    assert facts["modalities"] == {"input": ["text"], "output": ["text"]}
    assert facts["parameters"]["type"] == "object"


def test_errors_have_the_right_class_code_and_field(client: openai.OpenAI, server: Server):
    def raised(kind: type[openai.APIStatusError], **fields: Any) -> openai.APIStatusError:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": MODEL, "messages": FRANCE, **fields})
        assert caught.value.request_id
        return caught.value

    assert raised(openai.BadRequestError, temperature=9).param == "temperature"
    assert raised(openai.BadRequestError, extra_body={"temprature": 1}).code == "unknown_parameter"
    too_long = raised(openai.BadRequestError, messages=[{"role": "user", "content": "word " * LIMIT}])
    assert too_long.code == "context_length_exceeded" and str(LIMIT) in too_long.message
    assert raised(openai.NotFoundError, model="gpt-none").code == "model_not_found"
    late = raised(openai.InternalServerError, messages=STORY, extra_body={"timeout": 0.01})
    assert (late.status_code, late.code) == (504, "request_timeout")
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.audio.speech.create(model=MODEL, voice="alloy", input="hi")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()


def test_a_full_queue_is_a_rate_limit_and_others_are_not_disturbed(server: Server):
    def is_full() -> bool:
        return server.gauges()["mstar_waiting_choices"] >= 8

    async def fill() -> tuple[list[str], openai.RateLimitError]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            asked: Any = {"model": MODEL, "messages": STORY, "temperature": 0, "extra_body": {"ignore_eos": True}}

            async def read() -> list[str]:
                choices = dict.fromkeys(range(8), "")
                async for chunk in await client.chat.completions.create(**asked, stream=True, n=8, max_tokens=30):
                    for choice in chunk.choices:
                        choices[choice.index] += choice.delta.content or ""
                return list(choices.values())

            streams = [asyncio.create_task(read()) for _ in range(2)]
            await asyncio.to_thread(server.wait_for, is_full, 5, "as many wait as may")
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**asked, max_tokens=1)
            texts = [text for choices in await asyncio.gather(*streams) for text in choices]
            return texts, caught.value

    texts, error = asyncio.run(fill())
    assert len(texts) == 16 and len(set(texts)) == 1 and texts[0]
    assert error.code == "queue_full" and int(error.response.headers["retry-after"]) >= 1


def test_a_stream_that_is_closed_ends_its_request(client: openai.OpenAI, server: Server):
    stream = client.chat.completions.create(model=MODEL, messages=STORY, stream=True, max_tokens=300)
    next(stream)
    stream.close()
    server.wait_for(server.is_idle, 3, "the request of a client that left is gone")
