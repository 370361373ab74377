"""Qwen3.5 behind the running server: greedy tokens under load as in transformers, with images and videos."""

from collections.abc import Callable

import pytest
import torch
from support.qwen3_5_media import animation, chat, movie, picture
from support.qwen3_5_server import Case, ServedQwen, ask, cached_tokens, under_load
from support.server import Server

from mstar.model.base import ChatMessage, PromptRequest

NUM_TOKENS = 24
PAGE = 64
SHARED = 130
LENGTHS = (1, 5, 63, 64, 65, 200, 300, 128, 257)
SHARING = {5, 6, 8}
"""Of the texts, those that begin alike."""
A, B = ("image", picture(70, 90, 1)), ("image", picture(70, 90, 2))
"""Of the same size, so only their pixels tell them apart."""
LARGE, DOT = ("image", picture(240, 130, 3)), ("image", picture(1, 1, 4))
GIF, MP4 = ("video", animation(7, 64, 48, 5)), ("video", movie(20, 96, 64, 6))
LONG = "Tell in many words what there is, what it is made of, who would want it and why, and what is missing. " * 4


def texts() -> list[PromptRequest]:
    generator = torch.Generator().manual_seed(11)
    drawn = [torch.randint(5, 900, (length,), generator=generator).tolist() for length in LENGTHS]
    first = drawn[max(SHARING)]
    shared = [[*first[:SHARED], *ids[SHARED:]] if index in SHARING else ids for index, ids in enumerate(drawn)]
    return [PromptRequest("completion", token_ids=tuple(ids)) for ids in shared]


CHATS = [
    PromptRequest("chat", messages=(ChatMessage("system", LONG), ChatMessage("user", "What is the capital of Peru?"))),
    PromptRequest(
        "chat", messages=(ChatMessage("user", "Is water wet?"),), template_variables={"enable_thinking": False}
    ),
    chat("First ", A, " then ", B, " and again ", A, ": which are alike?"),
    chat(A, "What is this?"),
    chat(B, "What is this?"),
    chat(A, "What is this?"),
    chat(DOT),
    chat(LARGE, DOT, A),
    chat("Look at ", LARGE, LONG),
    chat("Compare ", GIF, " with ", MP4),
    chat("Compare ", GIF, " with ", B, " and with ", MP4, LONG),
]
CASES = [Case(request, NUM_TOKENS) for request in (*texts(), *CHATS)]

DEPLOYMENTS = {
    "dense, async": ("tiny", "qwen3_5", ()),
    "dense, plain, chunks of a page": (
        "tiny",
        "qwen3_5",
        ("scheduler.async_scheduling=false", "scheduler.max_step_tokens=64", "scheduler.max_step_patches=64"),
    ),
    "experts, async, tower on another worker": ("tiny-moe", "qwen3_5_4b", ("scheduler.max_step_tokens=192",)),
    "experts, plain, little room": (
        "tiny-moe",
        "qwen3_5",
        (
            "scheduler.async_scheduling=false",
            "scheduler.max_step_tokens=128",
            "resources.kv.num_pages=34",
            "resources.state.num_slots=5",
            "resources.encoded_media.max_bytes=20000",
        ),
    ),
}
Served = Callable[[str], ServedQwen]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    """By size, each written once."""
    made: dict[str, ServedQwen] = {}

    def get(size: str) -> ServedQwen:
        if size not in made:
            made[size] = ServedQwen(tmp_path_factory.mktemp(size), size)
        return made[size]

    return get


def test_the_reference_tells_the_requests_apart(served: Served):
    """Otherwise equal answers would say nothing."""
    qwen = served("tiny")
    answers = {tuple(qwen.expected(case)) for case in CASES}
    assert len(CASES) == 20
    assert len(answers) == len(CASES) - 1, "one is asked twice"


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_greedy_tokens_equal_transformers_under_random_arrivals(served: Served, tmp_path, name: str):
    size, config, settings = DEPLOYMENTS[name]
    qwen = served(size)
    with qwen.serving(tmp_path / "log", *settings, config=config) as server:
        qwen.check(CASES, under_load(server, CASES, spread_s=1.5))
        again = [CASES[i] for i in (19, 11, 14, 6, 0, 18)]
        qwen.check(again, under_load(server, again, spread_s=0.0))
        twice = [ask(server, CASES[6]) for _ in range(2)]  # however little room there is
        assert cached_tokens(twice[1]) == (LENGTHS[6] - 1) // PAGE * PAGE
        if "little room" not in name:
            assert_media_are_told_apart(qwen, server)
        server.wait_for(server.is_idle, 5, "everything given back")
        gauges = server.gauges()
        assert gauges['mstar_slots{pool="state",state="live"}'] == 0
        overlap = "async" in name
        assert (gauges['mstar_steps_total{kind="speculated"}'] > 0) == overlap
        if "little room" in name:
            assert gauges['mstar_evictions_total{kind="snapshot"}'] > 0
        assert server.stop() == 0


def assert_media_are_told_apart(qwen: ServedQwen, server: Server) -> None:
    """The same text with one image, another and the first again, of one size and of two."""
    for first, second in ((A, B), (A, LARGE)):
        name = f"{len(first[1])} and {len(second[1])}"
        cases = [Case(chat(image, f"({name}) {LONG}"), 8) for image in (first, second, first)]
        answers = [ask(server, case) for case in cases]
        qwen.check(cases, answers)
        found = [cached_tokens(answer) for answer in answers]
        prompts = [answer["usage"]["prompt_tokens"] for answer in answers]
        assert found == [0, 0, (prompts[0] - 1) // PAGE * PAGE], (found, prompts)
