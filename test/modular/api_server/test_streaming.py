"""Text over HTTP, streamed and not: assembly, stop strings, finish reasons, usage, chunk order (families A and B17)."""

import itertools
import json
import random
import socket

import pytest
from support.running_front import MODEL, RunningFront

from mstar.communication.messages import OpenRequest

REPLY = " The capital of France is Paris.\n    indented 你好 😀 naïve."
ROUTES = ("/v1/chat/completions", "/v1/completions")
LONG = {"max_tokens": 200}


def whole(front: RunningFront, route: str, **fields: object) -> dict:
    answer = front.complete(**fields) if route == ROUTES[1] else front.chat(**fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "stop", [None, "France is", "is Par", "\n    in", "pital", "😀 na", ["zzz", "Paris.\n"], "never"]
)
def test_stream_and_whole_answer_agree(front: RunningFront, route: str, stop: object):
    """A1, A2, A3, A4: a stop string is found wherever tokens end, nothing of it is shown, a held tail is flushed."""
    expected = REPLY
    for one in [stop] if isinstance(stop, str) else stop or []:
        expected = expected.partition(one)[0] if one in expected else expected
    answer = whole(front, route, stop=stop, **LONG)
    stream = front.stream(route, stop=stop, stream_options={"include_usage": True}, **LONG)
    assert text_of(answer["choices"][0]) == stream.text() == expected
    assert [answer["choices"][0]["finish_reason"]] == stream.reasons() == ["stop"]
    assert answer["usage"] == stream.chunks[-1]["usage"]
    for shown in itertools.accumulate(stream.deltas()):
        assert expected.startswith(shown), "nothing is shown that is not part of the answer"


def test_a_held_tail_is_flushed_at_the_limit(front: RunningFront):
    """A4: the answer ends in the middle of what could have become the stop string."""
    ids = front.tokenizer.encode(" The capital").ids
    answer = whole(front, ROUTES[0], stop=" The capital of Spain", max_tokens=len(ids))
    stream = front.stream(stop=" The capital of Spain", max_tokens=len(ids))
    assert text_of(answer["choices"][0]) == stream.text() == " The capital"
    assert stream.reasons() == ["length"]


@pytest.mark.parametrize("text", [" 👩‍👩‍👧‍👦🇫🇷", "e\u0301a\u0308", "日本語テキスト", "  two  spaces", "\n\n\tx\r\n"])
@pytest.mark.parametrize("route", ROUTES)
def test_no_character_is_split(front: RunningFront, text: str, route: str):
    """A7, A9."""
    front.reply(text)
    stream = front.stream(route, **LONG)
    assert stream.text() == text
    assert not any("\ufffd" in delta for delta in stream.deltas())


def test_chunks_come_in_openais_order(front: RunningFront):
    """A11, A13: role first, one chunk with a finish reason, no usage that nobody asked for."""
    stream = front.stream(**LONG)
    first, *middle, last = stream.chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert stream.is_done and stream.errors == []
    assert not any("usage" in chunk for chunk in stream.chunks)
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in stream.chunks}) == 1
    assert first["object"] == "chat.completion.chunk" and first["id"].startswith("chatcmpl-")
    stream = front.stream(ROUTES[1], n=3, **LONG)
    assert [stream.reasons(choice) for choice in range(3)] == [["stop"]] * 3
    assert stream.chunks[0]["object"] == "text_completion" and stream.chunks[0]["id"].startswith("cmpl-")


@pytest.mark.parametrize("fields", [{}, {"stop": ["never this"]}], ids=["written at once", "held"])
def test_tokens_of_one_pass_share_a_chunk(front: RunningFront, fields: dict):
    """Chunks of HTTP, told from the bytes: eight choices whose tokens come together are one write, not eight."""
    num_choices, num_tokens = 8, len(front.tokenizer.encode(REPLY).ids) + 1
    body = json.dumps({"model": MODEL, "prompt": "hi", "n": num_choices, "max_tokens": 200, "stream": True, **fields})
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection((front.http.base_url.host, front.http.base_url.port), timeout=30) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    rest, chunks = received.partition(b"\r\n\r\n")[2], []
    while (size := int(rest.partition(b"\r\n")[0], 16)) > 0:
        begin = rest.index(b"\r\n") + 2
        chunks.append(rest[begin : begin + size])
        rest = rest[begin + size + 2 :]
    num_events = sum(chunk.count(b"data: ") for chunk in chunks)
    assert num_events > num_choices * num_tokens // 2 and chunks[-1].endswith(b"data: [DONE]\n\n")
    assert len(chunks) <= num_tokens + 2


@pytest.mark.parametrize("n", [1, 2])
def test_usage_comes_once_last_and_without_choices(front: RunningFront, n: int):
    """A14."""
    stream = front.stream(n=n, stream_options={"include_usage": True}, **LONG)
    assert [chunk["usage"] for chunk in stream.chunks[:-1]] == [None] * (len(stream.chunks) - 1)
    assert stream.chunks[-1]["choices"] == []
    num_tokens = len(front.tokenizer.encode(REPLY).ids) + 1
    prompt = front.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()["count"]
    assert stream.chunks[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": n * num_tokens,
        "total_tokens": prompt + n * num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_options_need_a_stream(front: RunningFront):
    """A15."""
    for stream in ({"stream": False}, {}):
        answer = front.chat(stream_options={"include_usage": True}, **stream)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream_options"
    assert front.stream(stream_options={"include_usage": True}).chunks[-1]["usage"]["prompt_tokens"] > 0
    assert front.stream(stream_options={"include_usage": False}).chunks[-1]["choices"]


def test_finish_reasons_are_true(front: RunningFront):
    """A12, without tools."""
    ids = front.tokenizer.encode(REPLY).ids
    for max_tokens, reason in ((3, "length"), (len(ids), "length"), (len(ids) + 1, "stop"), (None, "stop")):
        answer = whole(front, ROUTES[0], max_tokens=max_tokens)
        assert answer["choices"][0]["finish_reason"] == reason
        assert answer["usage"]["completion_tokens"] == min(max_tokens or 1000, len(ids) + 1)


def test_usage_counts_end_tokens_and_no_text_behind_a_stop_string(front: RunningFront):
    ids = front.tokenizer.encode(REPLY).ids
    shown = front.tokenizer.encode(" The capital").ids
    assert ids[: len(shown)] == shown
    answer = whole(front, ROUTES[0], stop=" of France", **LONG)
    assert text_of(answer["choices"][0]) == " The capital"
    assert answer["usage"]["completion_tokens"] == len(shown)


def test_the_worker_is_told_to_stop(front: RunningFront):
    """The script would go on without end."""
    words = itertools.cycle(front.tokenizer.encode(" capital of").ids)
    front.worker.script = lambda _: (next(words) for _ in itertools.count())
    answer = whole(front, ROUTES[0], stop="f capital", max_tokens=200)
    assert text_of(answer["choices"][0]) == " capital o"
    assert answer["choices"][0]["finish_reason"] == "stop"
    front.wait_until(lambda: front.worker.num_open == 0)


def test_a_stop_token_ends_and_has_no_text(front: RunningFront):
    stop = front.tokenizer.encode(" of").ids[0]
    assert front.tokenizer.encode(REPLY).ids.count(stop) == 1
    answer = whole(front, ROUTES[1], stop_token_ids=[stop], **LONG)
    assert text_of(answer["choices"][0]) == " The capital"
    assert answer["usage"]["completion_tokens"] == len(front.tokenizer.encode(" The capital of").ids)
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("route", ROUTES)
def test_seeded_choices_are_distinct_and_reproducible(front: RunningFront, route: str):
    """B17: the scripted worker draws from the seed that it is given, as a sampler does."""

    def draw(opening: OpenRequest) -> list[int]:
        rng = random.Random(opening.sampling.seed)
        return [rng.randrange(3, 300) for _ in range(opening.sampling.max_tokens)]

    front.worker.script = draw
    fields = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 12}
    first = [text_of(choice) for choice in whole(front, route, **fields)["choices"]]
    assert len(set(first)) == 4
    for _ in range(10):
        answer = whole(front, route, **fields)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [text_of(choice) for choice in answer["choices"]] == first
        stream = front.stream(route, **fields)
        assert [stream.text(choice) for choice in range(4)] == first
    assert text_of(whole(front, route, **(fields | {"n": 1}))["choices"][0]) == first[0], "alone or among others"
    other = [text_of(choice) for choice in whole(front, route, **(fields | {"seed": 8}))["choices"]]
    assert not set(other) & set(first)


def test_without_a_seed_requests_differ(front: RunningFront):
    before = len(front.openings())
    for _ in range(3):
        assert front.chat(n=2, max_tokens=1).status_code == 200
    assert len({opening.sampling.seed for opening in front.openings()[before:]}) == 6


def test_several_prompts_are_several_choices(front: RunningFront):
    def echo(opening: OpenRequest) -> list[int]:
        ids = opening.prompt_ids
        return [int.from_bytes(ids.data[4 * i : 4 * i + 4], "little") for i in range(ids.shape[0])]

    front.worker.script = echo
    prompts = [" The capital", " of France", " is Paris"]
    ids = [front.tokenizer.encode(prompt).ids for prompt in prompts]
    for prompt in (prompts, ids):
        answer = whole(front, ROUTES[1], prompt=prompt, n=2)
        assert [text_of(choice) for choice in answer["choices"]] == [p for p in prompts for _ in range(2)]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["usage"]["completion_tokens"] == 2 * sum(len(i) for i in ids)
        stream = front.stream(ROUTES[1], prompt=prompt, n=2)
        assert [stream.text(choice) for choice in range(6)] == [p for p in prompts for _ in range(2)]
    assert text_of(whole(front, ROUTES[1], prompt=ids[0])["choices"][0]) == prompts[0]


def test_a_completion_has_sixteen_tokens_unless_asked(front: RunningFront):
    answer = whole(front, ROUTES[1])
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
