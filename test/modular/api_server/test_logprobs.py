"""Log probabilities: which tokens have them, what they say, and in which of OpenAI's two shapes (B14)."""

import json
import math
from typing import Any

import pytest
from support.running_front import RunningFront

from mstar.communication.messages import SamplingParams, TokenLogprobs

TEXT = "/v1/completions"


def entry(token: int, settings: SamplingParams) -> TokenLogprobs | None:
    if settings.num_logprobs < 0:
        return None
    num_top = settings.num_logprobs
    return TokenLogprobs(-0.25, tuple(range(50, 50 + num_top)), tuple(-1.0 - i for i in range(num_top)))


@pytest.fixture
def with_logprobs(front: RunningFront) -> RunningFront:
    front.worker.logprobs = entry
    return front


def checked(content: bytes) -> Any:
    """Valid JSON with finite numbers."""
    return json.loads(content, parse_constant=pytest.fail)


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_logprobs(with_logprobs: RunningFront, streamed: bool):
    """B14: one entry per shown token, in order; bytes join to the text; end tokens have none."""
    front = with_logprobs
    front.reply(" 你好 France 😀")
    fields = {"logprobs": True, "top_logprobs": 5, "top_k": 1, "top_p": 1e-4}
    if streamed:
        stream = front.stream(**fields)
        logs = [c["choices"][0]["logprobs"] for c in stream.chunks if c["choices"][0].get("logprobs")]
        content, text = [e for log in logs for e in log["content"]], stream.text()
    else:
        choice = checked(front.chat(**fields).content)["choices"][0]
        content, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert front.openings()[-1].sampling.num_logprobs == 5
    assert bytes(byte for e in content for byte in e["bytes"]).decode() == text == " 你好 France 😀"
    assert [len(e["top_logprobs"]) for e in content] == [5] * len(front.tokenizer.encode(text).ids)
    assert all(math.isfinite(e["logprob"]) for e in content)
    assert content[0]["top_logprobs"][0] == {
        "token": front.tokenizer.decode([50]),
        "logprob": -1.0,
        "bytes": list(front.tokenizer.decode([50]).encode()),
    }


def test_logprobs_of_impossible_tokens_are_finite(front: RunningFront):
    """B14. The wire's JSON form has no infinity, MessagePack does."""
    front.worker.logprobs = lambda token, _: TokenLogprobs(-math.inf, (5, 6), (0.0, -math.inf))
    body = checked(front.chat(logprobs=True, top_logprobs=2, max_tokens=1).content)
    (only,) = body["choices"][0]["logprobs"]["content"]
    assert only["logprob"] == only["top_logprobs"][1]["logprob"] == -9999.0


def test_logprobs_do_not_show_what_a_stop_string_cut(with_logprobs: RunningFront):
    for streamed in (False, True):
        fields = {"logprobs": True, "stop": " of France"}
        if streamed:
            chunks = with_logprobs.stream(**fields).chunks
            entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        else:
            entries = with_logprobs.chat(**fields).json()["choices"][0]["logprobs"]["content"]
        assert "".join(e["token"] for e in entries) == " The capital"
        assert all(e["top_logprobs"] == [] for e in entries)


@pytest.mark.parametrize("streamed", [False, True])
def test_completion_logprobs(with_logprobs: RunningFront, streamed: bool):
    front = with_logprobs
    front.reply(" The capital")
    if streamed:
        logs = [c["choices"][0]["logprobs"] for c in front.stream(TEXT, logprobs=2).chunks]
        logs = [log for log in logs if log]
        joined = {key: [x for log in logs for x in log[key]] for key in logs[0]}
    else:
        joined = front.complete(logprobs=2).json()["choices"][0]["logprobs"]
    ids = front.tokenizer.encode(" The capital").ids
    tokens = [front.tokenizer.decode([token]) for token in ids]
    assert joined["tokens"] == tokens
    assert joined["token_logprobs"] == [-0.25] * len(ids)
    assert joined["text_offset"] == [len("".join(tokens[:i])) for i in range(len(ids))]
    fifty, fifty_one = front.tokenizer.decode([50]), front.tokenizer.decode([51])
    assert joined["top_logprobs"][0] == {tokens[0]: -0.25, fifty: -1.0, fifty_one: -2.0}


def test_logprobs_fields_need_each_other(front: RunningFront):
    for answer, param in (
        (front.chat(top_logprobs=2), "top_logprobs"),
        (front.chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (front.chat(logprobs=5), "logprobs"),
        (front.complete(logprobs=21), "logprobs"),
    ):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert front.chat(logprobs=False, max_tokens=1).json()["choices"][0]["logprobs"] is None
