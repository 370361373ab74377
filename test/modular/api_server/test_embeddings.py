"""`/v1/embeddings`: what it takes, what comes back in both encodings, and models that have none."""

from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.running_front import MODEL, RunningFront, build_spec

from mstar.communication.host_tensors import from_numpy, to_numpy
from mstar.communication.messages import HostTensor, OpenRequest

SIZE = 32


def vector_of(ids: list[int]) -> np.ndarray:
    return np.random.default_rng(ids).standard_normal(SIZE).astype(np.float32)


def embedding(opening: OpenRequest) -> HostTensor:
    assert opening.prompt_ids is not None
    return from_numpy(vector_of(to_numpy(opening.prompt_ids).tolist()))


@pytest.fixture
def embedding_front(front: RunningFront) -> Iterator[RunningFront]:
    default, front.worker.embedding = front.worker.embedding, embedding
    yield front
    front.worker.embedding = default


def embed(front: RunningFront, given: Any, **fields: Any) -> httpx.Response:
    return front.http.post("/v1/embeddings", json={"model": MODEL, "input": given, **fields})


def ids_of(front: RunningFront, text: str) -> list[int]:
    return front.tokenizer.encode(text).ids


def test_every_kind_of_input(embedding_front: RunningFront):
    front = embedding_front
    texts = ["hi there", "France is", "hi there"]
    for given in (texts, [ids_of(front, text) for text in texts]):
        body = embed(front, given).json()
        assert body["object"] == "list" and body["model"] == MODEL
        assert [(entry["object"], entry["index"]) for entry in body["data"]] == [("embedding", i) for i in range(3)]
        for entry, text in zip(body["data"], texts, strict=True):
            assert np.array(entry["embedding"], np.float32).tolist() == vector_of(ids_of(front, text)).tolist()
        num_tokens = sum(len(ids_of(front, text)) for text in texts)
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    for given in ("hi there", ids_of(front, "hi there")):
        (entry,) = embed(front, given, encoding_format="base64").json()["data"]
        numbers = np.frombuffer(b64decode(entry["embedding"]), "<f4")
        assert numbers.tolist() == vector_of(ids_of(front, "hi there")).tolist()


def test_the_official_client_reads_both_encodings(embedding_front: RunningFront):
    front = embedding_front
    expected = vector_of(ids_of(front, "hi")).tolist()
    with openai.OpenAI(base_url=front.base_url + "/v1", api_key="unused", max_retries=0) as client:
        plain = client.embeddings.create(model=MODEL, input="hi", encoding_format="float")
        packed = client.embeddings.create(model=MODEL, input=["hi"], user="me")
        assert np.array(plain.data[0].embedding, np.float32).tolist() == packed.data[0].embedding == expected
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model=MODEL, input="hi", dimensions=SIZE - 1)
        assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("given", "fields", "param"),
    [
        ("", {}, "input"),
        ([], {}, "input"),
        ([""], {}, "input"),
        (["a", 1], {}, "input[1]"),
        ([[]], {}, "input"),
        ([100_000], {}, "input"),
        ([[1, -1]], {}, "input"),
        (7, {}, "input"),
        (None, {}, "input"),
        ([1] * 256, {}, "input"),
        ("a " * 300, {}, "input"),
        ("hi", {"dimensions": 3}, "dimensions"),
        ("hi", {"encoding_format": "int8"}, "encoding_format"),
        ("hi", {"max_tokens": 3}, "max_tokens"),
    ],
)
def test_what_is_refused_is_named(embedding_front: RunningFront, given: Any, fields: dict[str, Any], param: str):
    answer = embed(embedding_front, given, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split("[")[0] == param.split("[")[0]
    legal = embed(embedding_front, "hi", dimensions=SIZE, encoding_format="float")
    assert legal.status_code == 200 and len(legal.json()["data"][0]["embedding"]) == SIZE


def test_one_prompt_too_long_is_told_with_both_numbers(embedding_front: RunningFront):
    error = embed(embedding_front, [[1], [1] * 300]).json()["error"]
    assert error["code"] == "context_length_exceeded" and "256" in error["message"] and "300" in error["message"]
    assert embed(embedding_front, [[1], [1] * 255]).status_code == 200


def test_fields_of_any_request_reach_the_worker(embedding_front: RunningFront):
    assert embed(embedding_front, ["a", "b"], priority=-3, cache_salt="s").status_code == 200
    for opening in embedding_front.openings()[-2:]:
        assert (opening.priority, opening.cache_salt) == (-3, "s")
    embedding_front.worker.embedding = None
    late = embed(embedding_front, "a", timeout=0.05)
    assert late.status_code == 504 and late.json()["error"]["code"] == "request_timeout"


def test_numbers_that_are_not_finite_are_an_error_not_json(embedding_front: RunningFront):
    broken = np.full(SIZE, np.nan, np.float32)
    embedding_front.worker.embedding = lambda _: from_numpy(broken)
    answer = embed(embedding_front, "hi")
    assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_request(embedding_front: RunningFront):
    front = embedding_front
    front.worker.embedding = None
    with pytest.raises(httpx.ReadTimeout):
        front.http.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "b"]}, timeout=0.3)
    front.wait_until(lambda: front.worker.num_open == 0)


def test_a_model_without_embeddings_says_what_it_answers(tmp_path):
    spec = build_spec(tmp_path)
    chat_only = replace(spec, card=replace(spec.card, endpoints=("/v1/chat/completions",)))
    with RunningFront(chat_only, None, lambda _: (), with_worker=False) as front:  # type: ignore[arg-type]
        for route in ("/v1/embeddings", "/v1/completions", "/v1/nonsense"):
            answer = front.http.post(route, json={"model": MODEL, "input": "hi"})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == (
                f"There is no POST {route}. This model answers /v1/chat/completions."
            )
