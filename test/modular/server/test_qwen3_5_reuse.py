"""Qwen3.5 behind the running server: what prompts find of earlier ones, and that finding it changes no bit."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.qwen3_5_server import Case, ServedQwen, ask, cached_tokens
from support.server import Server

from mstar.model.base import ChatMessage, PromptRequest

PAGE = 64
CONVERSATIONS, TURNS, SYSTEM_TOKENS, TURN_TOKENS, REPLY_TOKENS = 10, 6, 600, 60, 80
LEAST_SHARE = 0.97
WORDS = ("the sea", "a clock", "bread", "old roads", "winter", "a lost key", "numbers", "paper boats", "a tall tree")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> ServedQwen:
    return ServedQwen(tmp_path_factory.mktemp("tiny"), "tiny")


@pytest.fixture(scope="module")
def server(qwen: ServedQwen, tmp_path_factory) -> Iterator[Server]:
    """In the dtype that deployments run."""
    with qwen.serving(tmp_path_factory.mktemp("log") / "log", dtype="bfloat16") as server:
        yield server
        server.wait_for(server.is_idle, 5, "everything given back")
        assert server.stop() == 0


def of_ids(ids: Sequence[int], max_tokens: int = 2) -> Case:
    return Case(PromptRequest("completion", token_ids=tuple(ids)), max_tokens)


def drawn(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 900) for _ in range(count)]


def before_last(num_tokens: int) -> int:
    """Tokens of the full pages of a prompt that is asked again: its last token is always computed."""
    return (num_tokens - 1) // PAGE * PAGE


salts = itertools.count()


def cold(server: Server, case: Case, **fields: Any) -> dict[str, Any]:
    """The answer of a request that can find nothing."""
    answer = ask(server, case, cache_salt=f"cold {next(salts)}", **fields)
    assert cached_tokens(answer) == 0
    return answer


def test_the_same_prompt_again_computes_at_most_a_page(server: Server):
    assert before_last(300) == 256
    for index, length in enumerate((300, 1, 63, 64, 65, 128, 129, 500)):
        case = of_ids(drawn(length, seed=100 + index))
        found = [cached_tokens(ask(server, case)) for _ in range(3)]
        assert found == [0, before_last(length), before_last(length)], length


def test_a_turn_finds_the_last_full_page_of_the_turn_before(server: Server):
    """Whatever the model said and the user says next. Some prompts end with a page."""
    prompt: list[int] = []
    rng = random.Random(1)
    for turn, length in enumerate((200, 320, 321, 448, 500, 640, 1000)):
        earlier = len(prompt)
        prompt = [*prompt, *drawn(length - earlier, seed=200 + turn)]
        answer = ask(server, of_ids(prompt, max_tokens=rng.choice((1, 30))))
        assert cached_tokens(answer) == earlier // PAGE * PAGE, length


def test_the_third_prompt_with_the_same_beginning_finds_all_of_it(server: Server):
    """The second makes the state at the end of what they share, because it sees the pages."""
    system = drawn(600, seed=300)
    found = [cached_tokens(ask(server, of_ids([*system, *drawn(100, seed=301 + index)]))) for index in range(5)]
    assert found[2:] == [576, 576, 576], found


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not thinking"])
def test_chats_find_nearly_all_of_what_earlier_prompts_had(server: Server, qwen: ServedQwen, thinking: bool):
    """Conversations with one system prompt, round by round, as a client holds them: what is written again is the
    answer, not what was thought."""
    histories = [[ChatMessage("system", text(qwen, SYSTEM_TOKENS, seed=int(thinking)))] for _ in range(CONVERSATIONS)]
    seen: set[tuple[int, ...]] = set()
    num_reusable = num_cached = 0
    for turn in range(TURNS):
        for index, history in enumerate(histories):
            seed = 2 * (100 * turn + index) + 1000
            history.append(ChatMessage("user", text(qwen, TURN_TOKENS, seed)))
            variables = {"enable_thinking": thinking}
            case = Case(PromptRequest("chat", messages=tuple(history), template_variables=variables), 3)
            ids = qwen.prepare(case).token_ids
            assert ids is not None
            ends = range(PAGE, before_last(len(ids)) + 1, PAGE)
            num_reusable += PAGE * sum(tuple(ids[:end]) in seen for end in ends)
            seen.update(tuple(ids[:end]) for end in range(PAGE, len(ids) + 1, PAGE))
            num_cached += cached_tokens(ask(server, case))
            history.append(ChatMessage("assistant", text(qwen, REPLY_TOKENS, seed + 1)))
    share = num_cached / num_reusable
    print(f"{num_cached} of {num_reusable} tokens: {share:.4f}")
    assert num_reusable > 40_000
    assert LEAST_SHARE <= share <= 1


def text(qwen: ServedQwen, num_tokens: int, seed: int) -> str:
    """About so many tokens."""
    rng = random.Random(seed)
    words: list[str] = []
    while qwen.count(" ".join(words)) < num_tokens:
        words.append(rng.choice(WORDS))
    return " ".join(words)


def notes(answer: dict[str, Any]) -> tuple[str, list[str], list[float], list[dict[str, float]]]:
    """Everything that says something about the logits, to the last bit."""
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    return choice["text"], logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]


@pytest.mark.parametrize("rest", range(17))
def test_no_bit_depends_on_where_a_prompt_ends_or_on_what_it_found(server: Server, rest: int):
    """A prompt of two pages and a little, and one that goes on from it, which finds its pages and its state."""
    first = drawn(2 * PAGE + rest, seed=400 + rest)
    second = [*first, *drawn(90, seed=500 + rest)]
    for ids, least in ((first, 0), (first, before_last(len(first))), (second, 2 * PAGE), (second, 3 * PAGE)):
        case = of_ids(ids, max_tokens=6)
        warm = ask(server, case, logprobs=5)
        assert cached_tokens(warm) == least
        assert notes(warm) == notes(cold(server, case, logprobs=5))
        _, _, chosen, tops = notes(warm)
        values = [*chosen, *(value for top in tops for value in top.values())]
        assert all(math.isfinite(value) and -1000 < value <= 0 for value in values), values
