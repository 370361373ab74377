"""How many tokens a request is granted, and what is refused, at every border."""

import pytest

from mstar.conductor.admission import MAX_CHARS_PER_TOKEN, check_length, grant_tokens
from mstar.conductor.events import Failure, RefusedError
from mstar.conductor.request import GenerateRequest, PromptInput, choice_seed
from mstar.model.base import ChatMessage

LIMIT = 100


def request(max_tokens: int | None = None, *, clamps: bool = False, kind: str = "completion") -> GenerateRequest:
    prompt = PromptInput(kind)  # type: ignore[arg-type]
    return GenerateRequest("", (prompt,), max_tokens=max_tokens, clamps_max_tokens=clamps)


def refusal(asked: GenerateRequest, num_prompt: int, max_total: int | None = None) -> Failure:
    with pytest.raises(RefusedError) as caught:
        grant_tokens(asked, num_prompt, LIMIT, max_total)
    return caught.value.failure


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "clamps", "max_total", "granted"),
    [
        (1, None, False, None, 99),
        (99, None, False, None, 1),
        (90, 10, False, None, 10),
        (95, 16, True, None, 5),
        (10, 16, True, None, 16),
        (10, None, False, 50, 40),
        (49, 1, False, 50, 1),
        (40, 16, True, 50, 10),
        (10, None, False, 5000, 90),
    ],
)
def test_granted(num_prompt: int, max_tokens: int | None, clamps: bool, max_total: int | None, granted: int):
    assert grant_tokens(request(max_tokens, clamps=clamps), num_prompt, LIMIT, max_total) == granted


@pytest.mark.parametrize("num_prompt", [100, 101, 1000])
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_of_the_limit_or_more_is_refused_with_both_numbers(num_prompt: int, max_tokens: int | None):
    failure = refusal(request(max_tokens, kind="chat"), num_prompt)
    assert (failure.status, failure.code, failure.param) == (400, "context_length_exceeded", "messages")
    assert str(num_prompt) in failure.message and str(LIMIT) in failure.message


def test_prompt_and_asked_output_beyond_the_limit_are_refused_with_all_numbers():
    asked = GenerateRequest("", (PromptInput("chat"),), max_tokens=11, max_tokens_name="max_completion_tokens")
    failure = refusal(asked, 90)
    assert (failure.code, failure.param) == ("context_length_exceeded", "max_completion_tokens")
    assert all(str(number) in failure.message for number in (90, 11, LIMIT))


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(50, None), (50, 1), (20, 31)])
def test_what_the_caches_never_hold_is_refused(num_prompt: int, max_tokens: int | None):
    failure = refusal(request(max_tokens), num_prompt, max_total=50)
    assert (failure.status, failure.code) == (400, "request_too_large")
    assert str(num_prompt) in failure.message and "50" in failure.message


def test_a_text_that_cannot_fit_is_refused_without_tokenizing():
    longest = LIMIT * MAX_CHARS_PER_TOKEN
    for prompt in (
        PromptInput("completion", text="x" * longest),
        PromptInput("chat", messages=(ChatMessage("user", "x" * (longest - 5)), ChatMessage("user", "x" * 5))),
        PromptInput("completion", token_ids=(1,) * LIMIT),
    ):
        with pytest.raises(RefusedError, match="at least 100 tokens"):
            check_length(GenerateRequest("", (PromptInput("completion", text="ok"), prompt)), LIMIT)
    check_length(GenerateRequest("", (PromptInput("completion", text="x" * (longest - 1)),)), LIMIT)
    check_length(GenerateRequest("", (PromptInput("completion", token_ids=(1,) * (LIMIT - 1)),)), LIMIT)


@pytest.mark.parametrize("max_tokens", [LIMIT, 2**31, 2**64, 10**400])
def test_an_output_that_cannot_fit_is_refused_before_any_work(max_tokens: int):
    with pytest.raises(RefusedError, match="max_tokens asks for") as caught:
        check_length(request(max_tokens), LIMIT)
    assert (caught.value.failure.code, caught.value.failure.param) == ("context_length_exceeded", "max_tokens")
    check_length(request(LIMIT - 1), LIMIT)
    check_length(request(max_tokens, clamps=True), LIMIT)


def test_choice_seeds_are_distinct_reproducible_and_non_negative():
    seeds = {
        (seed, index): choice_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 7, 2**63 - 1) for index in range(128)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= value < 2**63 for value in seeds.values())
    assert choice_seed(7, 3) == seeds[7, 3]


def test_choice_seed_is_splitmix64():
    """First outputs of the published generator for seed 0, without their lowest bit."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert tuple(choice_seed(0, index) for index in range(3)) == tuple(value >> 1 for value in published)
