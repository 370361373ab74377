"""Request fields: what is refused, by name, and what the legal neighbour makes the worker do (family B)."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from support.running_front import MAX_SEQ_LEN, MODEL, RunningFront

from mstar.api_server.openai.adapter import GREEDY_BELOW
from mstar.api_server.openai.fields import LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY
from mstar.communication.messages import OpenRequest, SamplingParams
from mstar.engine.resources.logit_adjust import TokenCounts

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def refused(front: RunningFront, route: str = CHAT, **fields: Any) -> dict[str, Any]:
    """The error of a request that must be a 400."""
    body: dict[str, Any] = {"model": MODEL} | ({"messages": MESSAGES} if route == CHAT else {"prompt": "hi"})
    answer = front.http.post(route, json=body | fields)
    assert answer.status_code == 400, f"{fields}: {answer.status_code} {answer.text[:300]}"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and isinstance(error["message"], str) and error["code"]
    return error


def opened(front: RunningFront, route: str = CHAT, **fields: Any) -> OpenRequest:
    """What the worker was told of a request that must work."""
    answer = front.chat(**fields) if route == CHAT else front.complete(**fields)
    assert answer.status_code == 200, f"{fields}: {answer.text}"
    return front.openings()[-1]


def sampling(front: RunningFront, **fields: Any) -> SamplingParams:
    return opened(front, **fields).sampling


WRONG: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, 2.1, "1", True, [], 10**400]),
    ("top_p", [-0.1, 1.1, "x"]),
    ("min_p", [-0.1, 1.1]),
    ("top_k", [-2, 1.5, "3", 2**40, 2**64]),
    ("repetition_penalty", [0, -1, "1", 1e-10, 1e-38, 5e-324, 1e10, 1e39]),
    ("presence_penalty", [-2.1, 2.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("max_tokens", [0, -1, 1.5, "5", 2**31, 2**64, 10**400]),
    ("min_tokens", [-1, 1.5, MAX_SEQ_LEN + 1, 2**64]),
    ("n", [0, -1, 129, 1.5, "2", 2**64]),
    ("seed", [1.5, "7", 2**63, -(2**63) - 1, 2**64]),
    ("stop", ["", [""], ["ok", ""], [1], 5, {}, ["x"] * 17, "x" * 257]),
    ("stop_token_ids", [[-1], [400], [400, -1], ["5"], 5, [0] * 129, [2**64]]),
    ("ignore_eos", ["yes", 1]),
    ("stream", ["true", 1]),
    ("logit_bias", [{"400": 1}, {"-1": 1}, {"x": 1}, {"1.5": 1}, {"٣": 1}, {" 1": 1}, {"9" * 40: 1}]),
    ("logit_bias", [{"05": 1, "5": 2}, {"-0": 1}]),
    ("logit_bias", [{"1": 101}, {"1": "x"}, {"1": None}, [1]]),
    ("priority", [2**31, -(2**31) - 1, 1.0, 0.5, "1", True, 2**64]),
    ("cache_salt", ["", "x" * 257, 5, True, ["x"]]),
    ("timeout", [0, -1, 0.0, -0.0, "5", True, 10**400, [1]]),
    ("parameters", [5, []]),
    ("model", [None, 5]),
]  # fmt: skip


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize(("field", "values"), WRONG)
def test_a_wrong_value_is_a_400_that_names_its_field(front: RunningFront, route: str, field: str, values: list[Any]):
    """B1, B2, B5, B18."""
    for value in values:
        assert refused(front, route, **{field: value})["param"] == field, value


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "num_logprobs": -1, "min_tokens": 0}),
        ({"temperature": None, "top_p": None, "n": None, "stop": None, "logit_bias": None}, {"temperature": 1.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 2, "top_k": 7}, {"temperature": 2.0, "top_k": 7}),
        ({"top_p": 0.5, "min_p": 1}, {"top_p": 0.5, "min_p": 1.0}),
        ({"temperature": 1e-4}, {"temperature": 1e-4}),
        ({"temperature": 1e-6}, {"temperature": 0.0}),
        ({"temperature": 1e-30}, {"temperature": 0.0}),
        ({"top_p": 1e-4}, {"top_p": 1e-4, "top_k": 0}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"top_p": 1e-300, "top_k": 5}, {"top_p": 1.0, "top_k": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"repetition_penalty": 1e-9}, {"repetition_penalty": 1e-9}),
        ({"repetition_penalty": 1e9}, {"repetition_penalty": 1e9}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"logit_bias": {"0": -100, "399": 100}}, {"bias_ids": (0, 399), "bias_values": (-100.0, 100.0)}),
        ({"logit_bias": {}}, {"bias_ids": ()}),
        ({"max_tokens": 1}, {"max_tokens": 1}),
        ({"min_tokens": 3, "max_tokens": 3}, {"min_tokens": 3}),
        ({"stop_token_ids": [0, 399]}, {"stop_token_ids": (2, 0, 399)}),
        ({"ignore_eos": True}, {"stop_token_ids": ()}),
        ({"ignore_eos": True, "stop_token_ids": [5]}, {"stop_token_ids": (5,)}),
    ],
)  # fmt: skip
def test_a_legal_value_reaches_the_worker(front: RunningFront, fields: dict[str, Any], expected: dict[str, Any]):
    """B2, B4, B5, B6: what the sampler will do is the worker's; the front hands over what was asked."""
    for route in (CHAT, TEXT):
        got = opened(front, route, **fields).sampling
        assert {name: getattr(got, name) for name in expected} == expected


def test_limits_of_counts_work(front: RunningFront):
    assert len(front.chat(n=128, max_tokens=1).json()["choices"]) == 128
    assert front.chat(stop=["x" * 256] * 16, max_tokens=1).status_code == 200
    assert front.chat(stop=[], max_tokens=1).status_code == 200
    error = refused(front, CHAT, logit_bias={str(token): 1 for token in range(1025)})
    assert error["param"] == "logit_bias" and "1025 entries" in error["message"] and "1024" in error["message"]
    error = refused(front, CHAT, logit_bias={str(token): 1 for token in range(1024)})  # the vocabulary has 400
    assert error["param"] == "logit_bias" and "vocabulary" in error["message"]
    assert refused(front, TEXT, prompt=["a"] * 200, n=3)["param"] == "n"
    assert refused(front, TEXT, prompt=["a"] * 513)["param"] == "prompt"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_numbers_that_json_does_not_have(front: RunningFront, field: str, literal: str):
    """B3."""
    body = json.dumps({"model": MODEL, "messages": MESSAGES, field: "#"}).replace('"#"', literal)
    answer = front.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert json.loads(answer.content, parse_constant=pytest.fail)["error"]["code"] == "invalid_json"


def test_min_tokens_above_max_tokens(front: RunningFront):
    assert refused(front, max_tokens=3, min_tokens=4)["param"] == "min_tokens"
    assert refused(front, TEXT, min_tokens=17)["param"] == "min_tokens"
    assert opened(front, TEXT, min_tokens=16).sampling.min_tokens == 16


def test_stop_ids_below_min_tokens_do_not_end_the_text_here(front: RunningFront):
    """B6, this side: an end token that the worker lets pass before min_tokens would be its error, not hidden here."""
    front.reply(" The")
    got = sampling(front, min_tokens=4, logit_bias={"2": 100})
    assert (got.min_tokens, got.bias_ids, got.stop_token_ids) == (4, (2,), (2,))


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0, "")),
        ({"priority": None, "cache_salt": None, "timeout": None}, (0, "")),
        ({"priority": 2**31 - 1}, (2**31 - 1, "")),
        ({"priority": -(2**31)}, (-(2**31), "")),
        ({"cache_salt": "é" * 256}, (0, "é" * 256)),
        ({"cache_salt": " ", "timeout": 1e300}, (0, " ")),
        ({"timeout": 30}, (0, "")),
    ],
)
def test_priority_and_salt_reach_the_worker(front: RunningFront, route: str, fields: Any, expected: tuple[int, str]):
    got = opened(front, route, **fields)
    assert (got.priority, got.cache_salt) == expected


def test_context_length(front: RunningFront):
    """B8, in tokens of this tokenizer."""
    limit = MAX_SEQ_LEN
    for num_prompt in (limit, limit + 1, 10 * limit):
        error = refused(front, TEXT, prompt=[5] * num_prompt)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert str(num_prompt) in error["message"] and str(limit) in error["message"]
    unit = " The"
    assert len(front.tokenizer.encode(unit).ids) == 1
    error = refused(front, TEXT, prompt=unit * limit)
    assert error["code"] == "context_length_exceeded" and f"{limit} tokens" in error["message"]
    error = refused(front, messages=[{"role": "user", "content": unit * 10 * limit}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert opened(front, TEXT, prompt=[5] * (limit - 1)).sampling.max_tokens == 1
    assert opened(front, TEXT, prompt=[5] * (limit - 5)).sampling.max_tokens == 5, "the default is cut"
    assert opened(front, TEXT, prompt=[5] * (limit - 5), max_tokens=5).sampling.max_tokens == 5
    error = refused(front, TEXT, prompt=[5] * (limit - 5), max_tokens=6)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(str(number) in error["message"] for number in (limit - 5, 6, limit))
    for field in ("max_tokens", "max_completion_tokens"):
        for max_tokens in (limit - 1, limit, 2**31 - 1):
            error = refused(front, **{field: max_tokens})
            assert (error["code"], error["param"]) == ("context_length_exceeded", field)
            assert str(max_tokens) in error["message"]
    prompt_len = front.chat(max_tokens=1).json()["usage"]["prompt_tokens"]
    assert opened(front).sampling.max_tokens == limit - prompt_len


def test_what_the_workers_caches_never_hold(front: RunningFront):
    state = front.parts.handle._workers.states[0]
    front.call(lambda: setattr(state, "max_total_tokens", 64))
    try:
        error = refused(front, TEXT, prompt=[5] * 60, max_tokens=5)
        assert error["code"] == "request_too_large" and "64" in error["message"]
        assert opened(front, TEXT, prompt=[5] * 60, max_tokens=4).sampling.max_tokens == 4
        assert opened(front, TEXT, prompt=[5] * 60).sampling.max_tokens == 4
    finally:
        front.call(lambda: setattr(state, "max_total_tokens", 0))


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
        (user([{"type": "video_url", "video_url": {"url": "x"}}]), "messages[0].content[0].type"),
        (user([{"type": "image_url", "image_url": "x"}]), "messages[0].content[0].image_url"),
        (user([{"type": "image_url", "image_url": {"url": "x", "detail": "low"}}]),
         "messages[0].content[0].image_url.detail"),
        (user([{"type": "text", "text": "x"}, {"type": "input_audio"}]), "messages[0].content[1].type"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "reasoning_content": "y"}], "messages[0].reasoning_content"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(front: RunningFront, messages: Any, param: str):
    """B10."""
    assert refused(front, messages=messages)["param"] == param


def prompt_text(front: RunningFront, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt that the worker got, as text."""
    ids = opened(front, messages=messages, max_tokens=1, **fields).prompt_ids
    tokens = [int.from_bytes(ids.data[4 * i : 4 * i + 4], "little") for i in range(ids.shape[0])]
    return front.tokenizer.decode(tokens, skip_special_tokens=False)


def test_messages_that_work(front: RunningFront):
    """B10: an empty assistant, parts as one string, no system message, tool calls of the past, developer as system."""

    def turn(role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    answer = "<|im_start|>assistant\n"
    assert prompt_text(front, [{"role": "user", "content": ""}]) == turn("user", "") + answer
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert prompt_text(front, [{"role": "user", "content": parts}]) == turn("user", "one two") + answer
    past = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    turns = [("system", "be brief"), ("user", "x"), ("assistant", ""), ("assistant", ""), ("tool", "4")]
    assert prompt_text(front, past) == "".join(turn(*each) for each in turns) + answer


def test_an_assistant_message_can_be_continued(front: RunningFront):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    assert prompt_text(front, messages, continue_final_message=True).endswith("<|im_start|>assistant\nIt is")
    assert refused(front, messages=messages[:1], continue_final_message=True)["param"] == "continue_final_message"
    for empty in ("", "  ", [{"type": "text", "text": ""}]):
        messages[-1]["content"] = empty
        assert refused(front, messages=messages, continue_final_message=True)["param"] == "continue_final_message"


NOT_YET: list[tuple[str, Any, Any]] = [
    ("tools", [{"type": "function", "function": {"name": "f"}}], []),
    ("tool_choice", "auto", "none"),
    ("parallel_tool_calls", 1, False),
    ("functions", [], None),
    ("function_call", "auto", None),
    ("response_format", {"type": "grammar"}, {"type": "json_object"}),
    ("modalities", ["audio"], ["text"]),
    ("audio", {"voice": "alloy", "format": "wav"}, None),
    ("prediction", {"type": "content", "content": "x"}, None),
    ("reasoning_effort", "low", None),
    ("verbosity", "low", None),
    ("web_search_options", {}, None),
    ("service_tier", "flex", "auto"),
    ("store", True, False),
    ("guided_json", {"not": {}}, {}),
    ("guided_regex", "", "x"),
    ("guided_choice", [], ["x"]),
    ("guided_regex", r"\ud83d\ude00", r"\u{1F600}"),
    ("guided_grammar", 5, "root ::= [a-z]"),
    ("guided_grammar", r'root ::= "\ud83d"', r'root ::= "\U0001F600"'),
    ("structured_outputs", {"structural_tag": "{}"}, {"choice": ["x"]}),
]


@pytest.mark.parametrize(("field", "wrong", "legal"), NOT_YET)
def test_what_is_not_supported_is_refused_by_name(front: RunningFront, field: str, wrong: Any, legal: Any):
    assert refused(front, **{field: wrong})["param"].split(".")[0] == field
    assert front.chat(max_tokens=1, **{field: legal}).status_code == 200


@pytest.mark.parametrize(("field", "wrong", "legal"), [("suffix", "x", None), ("best_of", 2, 1)])
def test_what_text_completions_do_not_support(front: RunningFront, field: str, wrong: Any, legal: Any):
    assert refused(front, TEXT, **{field: wrong})["param"] == field
    assert front.complete(max_tokens=1, **{field: legal}).status_code == 200


def test_tools_are_left_out_when_nobody_may_use_them(front: RunningFront):
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert front.chat(max_tokens=1, tools=tools, tool_choice="none").status_code == 200


def test_documented_no_ops_are_accepted(front: RunningFront):
    answer = front.chat(
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        service_tier="default",
        store=False,
        safety_identifier="x",
        prompt_cache_key="y",
    )
    assert answer.status_code == 200


def test_an_unknown_field_is_named(front: RunningFront):
    for route in (CHAT, TEXT):
        error = refused(front, route, temprature=1)
        assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")


def test_max_completion_tokens_is_max_tokens(front: RunningFront):
    assert sampling(front, max_completion_tokens=5).max_tokens == 5
    assert sampling(front, max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert refused(front, max_completion_tokens=5, max_tokens=6)["param"] == "max_tokens"
    for wrong in (0, 2**31, 2**64):
        assert refused(front, max_completion_tokens=wrong)["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    "prompt",
    [None, 5, "", [], [""], [[]], ["a", 5], [1, "a"], [[1], "a"], [-1], [400], [2**64], [[1], [400]], [1.5], [True]],
)
def test_prompts_that_are_refused(front: RunningFront, prompt: Any):
    assert refused(front, TEXT, prompt=prompt)["param"] == "prompt"


def test_the_models_own_parameters_are_validated(front: RunningFront):
    assert refused(front, parameters={"voice": "x"})["param"] == "parameters.voice"
    assert opened(front, parameters={}).parameters == b"{}"


def test_the_strongest_penalties_keep_logits_finite(front: RunningFront):
    """B5: what the sampler computes at the borders of the fields, at the lowest temperature that is not greedy."""
    for penalty in (LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY):
        settings = sampling(front, repetition_penalty=penalty, temperature=GREEDY_BELOW)
        counts = TokenCounts(3, torch.device("cpu"))
        counts.reset(1, np.array([0, 1, 2]))
        logits = torch.tensor([[1e6, -1e6, 0.0]])
        one = torch.ones(1, 1)
        counts.penalize(logits, torch.tensor([1]), one * settings.repetition_penalty, 0 * one, 0 * one)
        assert torch.isfinite(logits / settings.temperature).all()
