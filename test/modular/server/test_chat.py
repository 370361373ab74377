"""The served default model over HTTP: text assembly, stopping, limits, seeds and logprobs with a real engine behind it.
After every test the server answers and holds nothing."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.repository import ROOT
from support.running_front import Streamed
from support.server import READY, Server, running
from tokenizers import Tokenizer

from mstar import envs
from mstar.cli.targets import config_for
from mstar.launch.deployment import resolve_deployment

pytestmark = pytest.mark.network
PAGE = 64
LIMIT = 256
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a story."}]
RECORD = "name: Anna\ncity: Paris\nage: 31\n\n"
WORDS = "😀 你好 日本語 👩‍👩‍👧‍👦 e\u0301 naïve"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    deployment = resolve_deployment(config_for("smollm2", []), cache_dir=envs.CACHE_DIR.get())
    assert deployment.setup.tokenizer_dir is not None
    return Tokenizer.from_file(str(deployment.setup.tokenizer_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def _started(tokenizer, tmp_path_factory) -> Iterator[tuple[Server, str, float]]:
    """The server, what it had said when it was ready, and its free pages."""
    settings = (f"max_seq_len={LIMIT}", "resources.kv.num_pages=48", "num_threads=1")
    arguments = ["smollm2", *(word for setting in settings for word in ("--set", setting))]
    with running(arguments, tmp_path_factory.mktemp("log") / "log") as server:
        said = server.log.read_text()
        server.wait_for(lambda: num_free_pages(server) > 0, 5, "the first report of the worker")
        yield server, said, num_free_pages(server)
        assert server.stop() == 0


@pytest.fixture
def server(_started) -> Iterator[Server]:
    server, _, num_free = _started
    yield server
    answer = server.client.post(CHAT, json={"model": "smollm2", "messages": FRANCE, "temperature": 0})
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    server.wait_for(server.is_idle, 3, "everything given back")
    gauges = server.gauges()
    assert gauges["mstar_live_requests"] == gauges["mstar_waiting_choices"] == 0
    assert num_free_pages(server) == num_free


def num_free_pages(server: Server) -> float:
    """Pages that are no request's: free ones, and those kept for prompts to come."""
    pages = {name: value for name, value in server.gauges().items() if name.startswith("mstar_pages")}
    return sum(value for name, value in pages.items() if "free" in name or "cached" in name)


def body_of(route: str, fields: dict) -> dict:
    asked = {"messages": STORY} if route == CHAT else {"prompt": "The capital of France is"}
    return {"model": "smollm2", "temperature": 0, **asked, **fields}


def whole(server: Server, route: str = CHAT, **fields: object) -> dict:
    response = server.client.post(route, json=body_of(route, fields))
    assert response.status_code == 200, response.text
    return json.loads(response.content, parse_constant=pytest.fail)


def streamed(server: Server, route: str = CHAT, **fields: object) -> Streamed:
    response = server.client.post(route, json=body_of(route, fields) | {"stream": True})
    assert response.status_code == 200, response.text
    stream = Streamed.parse(response)
    assert stream.is_done and stream.errors == []
    return stream


def refused(server: Server, route: str = CHAT, **fields: object) -> dict:
    response = server.client.post(route, json=body_of(route, fields))
    assert response.status_code == 400, response.text
    return response.json()["error"]


def texts(answer: dict) -> list[str]:
    return [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]


def usage(num_prompt: int, num_completion: int) -> dict:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def uncached(answer: dict) -> dict:
    """The usage of an answer whose prompt begins as earlier ones did, as if nothing of it had been found."""
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found % PAGE == 0 and found < answer["usage"]["prompt_tokens"]
    return answer["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}


def entries(answer: dict) -> list[dict]:
    """Logprobs of a chat's only choice."""
    return answer["choices"][0]["logprobs"]["content"]


# What a newcomer is told to do.


def printed_request(said: str) -> str:
    *_, request, ready = re.split(r"^(?=Try it:|mstar is ready)", said.rstrip(), flags=re.MULTILINE)
    assert READY.fullmatch(ready), f"the ready line is the last one: {said}"
    return request.removeprefix("Try it:")


def documented_request(document: str, url: str) -> str:
    command = re.search(r"curl http://127\.0\.0\.1:8000/.*?-d '[^']*'", (ROOT / document).read_text(), re.DOTALL)
    assert command is not None
    return command[0].replace("http://127.0.0.1:8000", url)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize("source", ["ready line", "README.md", "docs/quickstart.rst"])
def test_the_request_to_try_answers_paris(server: Server, _started, source: str):
    request = printed_request(_started[1]) if source == "ready line" else documented_request(source, server.url)
    done = subprocess.run(["sh", "-c", request], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("chat", "France"),
        ("streaming", r"\((length|stop)\)"),
        ("many_at_once", "France"),
        ("embeddings", "Bread"),
        ("structured_output", "a river: "),
    ],
)
def test_examples_get_answers_of_the_model(server: Server, example: str, says: str):
    command = [sys.executable, ROOT / "examples" / f"{example}.py", server.url]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(says, done.stdout)


def test_the_memory_plan_has_the_weights_in_it(_started):
    said = _started[1]
    assert said.index("Memory plan of worker 0") < said.index("mstar is ready")
    assert re.search(r"weights +│ 134\.5 M parameters of the checkpoint in \w+", said)
    assert re.search(r"kv +│ 3,072 tokens in 48 pages of 64, ", said)


# Text assembly and stopping.


def stops_of(kind: str, tokens: list[str]) -> str | list[str]:
    """Stop strings by where they lie in the text of `tokens`."""
    long = next(index for index, token in enumerate(tokens) if index > 3 and len(token) > 4)
    return {
        "across tokens": tokens[long][-2:] + tokens[long + 1] + tokens[long + 2][:1],
        "inside a token": tokens[long][1:4],
        "at the beginning": tokens[0][:2],
        "with newline and colon": "city: Paris\nage: 3",
        "one of several": ["nowhere", "\nage", "31"],
        "never": "".join(tokens)[-3:] + "nowhere",
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["across tokens", "inside a token", "at the beginning", "with newline and colon", "one of several", "never"],
)
def test_a_stop_string_cuts_the_stream_and_the_whole_answer_alike(server: Server, kind: str):
    """A1, A2, A3, A4."""
    asked = {"prompt": RECORD * 3 + "name:", "max_tokens": 24}
    choice = whole(server, TEXT, **asked, logprobs=0)["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    text = choice["text"]
    assert text == "".join(tokens)
    stop = stops_of(kind, tokens)
    found = [text.index(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text]
    assert bool(found) == (kind != "never"), f"{stop!r} in {text!r}"
    expected = text[: min(found)] if found else text
    reason = "stop" if found else "length"
    answer = whole(server, TEXT, **asked, stop=stop)
    stream = streamed(server, TEXT, **asked, stop=stop, stream_options={"include_usage": True})
    assert texts(answer) == [expected]
    assert stream.text() == expected
    assert stream.reasons() == [answer["choices"][0]["finish_reason"]] == [reason]
    for shown in itertools.accumulate(stream.deltas()):
        assert expected.startswith(shown)
    num_shown = sum(offset < len(expected) for offset in offsets)
    assert answer["usage"]["completion_tokens"] == num_shown
    assert answer["usage"] == stream.chunks[-1]["usage"]


def test_characters_of_several_tokens_are_never_split(server: Server):
    """A7, A9: emoji, CJK, combining accents and a leading space; also where the limit cuts a character."""
    asked = {"prompt": f"words: {WORDS}\n" * 3 + "words:"}
    answer = whole(server, TEXT, **asked, max_tokens=40, stop="\n", logprobs=0)
    (text,) = texts(answer)
    assert text == " " + WORDS
    assert answer["choices"][0]["logprobs"]["tokens"].count("\ufffd") > 10, "tokens that are parts of characters"
    stream = streamed(server, TEXT, **asked, max_tokens=40, stop="\n")
    assert stream.text() == text
    assert len([delta for delta in stream.deltas() if delta]) > 10
    for line in stream.response.content.split(b"\n"):
        assert "\ufffd" not in line.decode("utf-8")
    lengths = []
    for max_tokens in range(1, 8):
        (cut,) = texts(whole(server, TEXT, **asked, max_tokens=max_tokens))
        assert text.startswith(cut)
        assert streamed(server, TEXT, **asked, max_tokens=max_tokens).text() == cut
        lengths.append(len(cut))
    assert len(set(lengths)) < len(lengths), "a limit within a character"


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [("The capital of France is", " P"), ("def f():\n    return 1\n\n" * 3 + "def f():", "\n    return 1\n\ndef")],
)
def test_leading_and_inner_space_is_kept(server: Server, tokenizer: Tokenizer, prompt: str, begins: str):
    """A9: joined deltas are one decode of all ids, told by the tokens' bytes."""
    asked = {"prompt": prompt, "max_tokens": 12}
    choice = whole(server, TEXT, **asked, logprobs=0)["choices"][0]
    assert choice["text"].startswith(begins)
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == streamed(server, TEXT, **asked).text()
    ids = tokenizer.encode(prompt).ids
    again = whole(server, TEXT, prompt=ids, max_tokens=12)
    assert texts(again) == [choice["text"]]
    assert again["usage"] == usage(len(ids), 12)


def test_finish_reasons_are_true(server: Server):
    """A12: a limit, a natural end, and a limit that falls on the last token before the end."""
    natural = whole(server, messages=FRANCE)
    assert natural["choices"][0]["finish_reason"] == "stop"
    num_tokens = natural["usage"]["completion_tokens"]
    for max_tokens, reason in ((3, "length"), (num_tokens - 1, "length"), (num_tokens, "stop")):
        answer = whole(server, messages=FRANCE, max_tokens=max_tokens)
        assert answer["choices"][0]["finish_reason"] == reason
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert streamed(server, messages=FRANCE, max_tokens=max_tokens).reasons() == [reason]
    assert texts(natural) == texts(whole(server, messages=FRANCE, max_tokens=num_tokens - 1))


def test_usage_is_the_tokenizers_count(server: Server, tokenizer: Tokenizer):
    system, user = (f"<|im_start|>{role}\n" for role in ("system", "user"))
    rendered = f"{system}{SYSTEM}<|im_end|>\n{user}{FRANCE[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    num_prompt = len(tokenizer.encode(rendered).ids)
    answer = whole(server, messages=FRANCE)
    num_answer = len(tokenizer.encode(texts(answer)[0]).ids)
    assert answer["usage"] == usage(num_prompt, num_answer + 1), "the end token counts"
    assert server.client.post("/tokenize", json={"messages": FRANCE}).json()["count"] == num_prompt
    prompts = ["The capital of", WORDS]
    answer = whole(server, TEXT, prompt=prompts, max_tokens=2)
    assert answer["usage"] == usage(sum(len(tokenizer.encode(prompt).ids) for prompt in prompts), 4)


def test_two_choices_share_one_usage(server: Server):
    """A11, A14."""
    asked = {"n": 2, "seed": 3, "temperature": 1, "max_tokens": 8, "ignore_eos": True}
    stream = streamed(server, **asked, stream_options={"include_usage": True})
    answer = whole(server, **asked)
    assert [stream.text(0), stream.text(1)] == texts(answer)
    assert [stream.reasons(0), stream.reasons(1)] == [["length"], ["length"]]
    *before, last = stream.chunks
    assert last["choices"] == []
    assert last["usage"] == answer["usage"]
    assert last["usage"]["completion_tokens"] == 16
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)
    assert not any("usage" in chunk for chunk in streamed(server, max_tokens=2).chunks)


# Parameters that must not end the engine.


def test_min_tokens_holds_back_an_end_that_is_asked_for(server: Server, tokenizer: Tokenizer):
    """B6."""
    end = tokenizer.token_to_id("<|im_end|>")
    asked = {"logit_bias": {str(end): 100}, "logprobs": True}
    answer = whole(server, **asked, min_tokens=4)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 5
    assert len(entries(answer)) == 4
    assert "<|im_end|>" not in [entry["token"] for entry in entries(answer)]
    assert whole(server, max_tokens=4)["choices"][0]["message"] == answer["choices"][0]["message"], "else as always"
    at_once = whole(server, **asked)
    assert (texts(at_once), at_once["usage"]["completion_tokens"]) == ([""], 1)
    limited = whole(server, **asked, min_tokens=4, max_tokens=4)
    assert (texts(limited), limited["choices"][0]["finish_reason"]) == (texts(answer), "length")


@pytest.mark.parametrize("num_tokens", [LIMIT - 1, LIMIT, LIMIT + 1, 10 * LIMIT])
@pytest.mark.parametrize("as_text", [False, True])
def test_prompts_around_the_limit(server: Server, tokenizer: Tokenizer, num_tokens: int, as_text: bool):
    """B8."""
    ids = tokenizer.encode(" a" * num_tokens).ids
    assert len(ids) == num_tokens
    prompt = " a" * num_tokens if as_text else ids
    if num_tokens < LIMIT:
        answer = whole(server, TEXT, prompt=prompt)
        assert uncached(answer) == usage(num_tokens, 1), "clamped to the room that is left"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert texts(whole(server, TEXT, prompt=prompt, max_tokens=1)) == texts(answer)
        return
    error = refused(server, TEXT, prompt=prompt)
    assert error["code"] == "context_length_exceeded"
    assert {str(LIMIT), str(num_tokens)} <= set(re.findall(r"\d+", error["message"]))


def test_room_for_the_prompt_but_not_for_what_is_asked(server: Server, tokenizer: Tokenizer):
    """B8: a 400 if max_tokens was given, else the text ends where the context does."""
    ids = tokenizer.encode(" a" * 240).ids
    error = refused(server, TEXT, prompt=ids, max_tokens=17)
    assert error["code"] == "context_length_exceeded"
    assert {str(LIMIT), "240", "17"} <= set(re.findall(r"\d+", error["message"]))
    assert uncached(whole(server, TEXT, prompt=ids, max_tokens=16, ignore_eos=True)) == usage(240, 16)
    answer = whole(server, messages=[{"role": "user", "content": " a" * 210}], ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == LIMIT


def test_seeded_choices_are_distinct_and_reproducible(server: Server):
    """B17: four choices, ten times, streamed and not."""
    asked = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 12}
    first = whole(server, **asked)
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len(set(texts(first))) == 4
    for _ in range(5):
        stream = streamed(server, **asked)
        assert [stream.text(index) for index in range(4)] == texts(first)
        assert [stream.reasons(index) for index in range(4)] == [[c["finish_reason"]] for c in first["choices"]]
    for _ in range(4):
        assert texts(whole(server, **asked)) == texts(first)
    assert set(texts(whole(server, **asked | {"seed": 8}))).isdisjoint(texts(first))


def test_logprobs_are_those_of_a_distribution(server: Server):
    greedy = entries(whole(server, max_tokens=12, logprobs=True, top_logprobs=20))
    assert len(greedy) == 12
    for entry in greedy:
        tops = entry["top_logprobs"]
        values = [top["logprob"] for top in tops]
        assert all(math.isfinite(value) and value <= 0 for value in values)
        assert values == sorted(values, reverse=True)
        assert len({tuple(top["bytes"]) for top in tops}) == 20
        assert 0.2 < sum(math.exp(value) for value in values) <= 1 + 1e-5
        assert (entry["token"], entry["logprob"]) == (tops[0]["token"], tops[0]["logprob"])


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}, {"temperature": 1e-30}])
def test_logprobs_where_only_one_token_may_be_drawn(server: Server, narrow: dict):
    """B4, B14: finite, valid JSON, and the greedy text."""
    asked = {"max_tokens": 6, "logprobs": True, "top_logprobs": 5}
    answer = whole(server, **asked, **{"temperature": 1, "seed": 1} | narrow)
    assert texts(answer) == texts(whole(server, max_tokens=6))
    for entry in entries(answer):
        assert len(entry["top_logprobs"]) == 5
        assert all(math.isfinite(top["logprob"]) for top in (entry, *entry["top_logprobs"]))


def test_a_drawn_token_has_a_logprob_of_its_own(server: Server):
    answer = whole(server, temperature=1, seed=5, max_tokens=24, logprobs=True, top_logprobs=1)
    drawn = entries(answer)
    assert all(entry["logprob"] <= entry["top_logprobs"][0]["logprob"] for entry in drawn)
    assert any(entry["token"] != entry["top_logprobs"][0]["token"] for entry in drawn)
