"""Reasoning and tool calls through the whole front, whole and streamed, with the official client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.running_front import MODEL, RunningFront

from mstar.communication.messages import TokenLogprobs

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "ratio": {"type": "number"}},
            "required": ["city"],
        },
    },
}
THOUGHT = "The user wants 2 things.\n\nI do <tool_call> next."
CALLS = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nSão "Paulo"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "<parameter=ratio>\n0.5\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=weather>\n<parameter=city>\n\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = [{"city": 'São "Paulo"', "days": 3, "ratio": 0.5}, {"city": ""}]


@pytest.fixture
def qwen(thinking: RunningFront) -> Iterator[RunningFront]:
    thinking.worker.logprobs = None
    thinking.reply(f"{THOUGHT}\n</think>\n\n Hello 😀")
    yield thinking
    thinking.wait_until(lambda: thinking.worker.num_open == 0)
    assert thinking.parts.handle.num_live == thinking.parts.handle.num_waiting == 0


@pytest.fixture
def client(qwen: RunningFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=qwen.base_url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def streamed(front: RunningFront, choice: int = 0, **fields: Any) -> dict[str, Any]:
    """A stream put together as a message, with its finish reason and usage."""
    stream = front.stream(stream_options={"include_usage": True}, **fields)
    assert stream.is_done and stream.errors == []
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in stream.chunks:
        for entry in chunk["choices"]:
            if entry["index"] != choice:
                continue
            delta = entry["delta"]
            assert len(delta.keys() - {"role"}) <= 1
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["calls"]):
                    assert call["type"] == "function" and call["id"].startswith("call_")
                    message["calls"].append([call["function"]["name"], ""])
                else:
                    assert set(call) == {"index", "function"}
                message["calls"][call["index"]][1] += call["function"]["arguments"]
    (reason,) = stream.reasons(choice)
    return message | {"reason": reason, "usage": stream.chunks[-1]["usage"]}


def whole(front: RunningFront, choice: int = 0, **fields: Any) -> dict[str, Any]:
    answer = front.chat(**fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    entry = body["choices"][choice]
    message = entry["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
    assert (message["content"] is None) == (bool(calls) and not streamed(front, choice, **fields)["content"])
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": calls,
        "reason": entry["finish_reason"],
        "usage": body["usage"],
    }


def both(front: RunningFront, **fields: Any) -> dict[str, Any]:
    """What whole and stream agree on."""
    one, other = whole(front, **fields), streamed(front, **fields)
    assert one == other
    return one


def num_tokens(front: RunningFront, text: str) -> int:
    return len(front.tokenizer.encode(text).ids)


def prompt_text(front: RunningFront) -> str:
    ids = front.openings()[-1].prompt_ids
    assert ids is not None
    tokens = [int.from_bytes(ids.data[4 * i : 4 * i + 4], "little") for i in range(ids.shape[0])]
    return front.tokenizer.decode(tokens, skip_special_tokens=False)


def test_reasoning_is_not_content(qwen: RunningFront):
    answer = both(qwen)
    assert (answer["content"], answer["reasoning"], answer["reason"]) == (" Hello 😀", THOUGHT, "stop")
    assert prompt_text(qwen).endswith("<|im_start|>assistant\n<think>\n")
    assert answer["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": num_tokens(qwen, f"{THOUGHT}\n</think>")
    }


def test_without_thinking_everything_is_content(qwen: RunningFront):
    qwen.reply(" Hello </think> 😀\n\n")
    answer = both(qwen, chat_template_kwargs={"enable_thinking": False})
    assert (answer["content"], answer["reasoning"]) == (" Hello </think> 😀\n\n", "")
    assert prompt_text(qwen).endswith("<think>\n\n</think>\n\n")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_limit_inside_the_reasoning(qwen: RunningFront):
    answer = both(qwen, max_tokens=5)
    assert (answer["content"], answer["reason"]) == ("", "length") and THOUGHT.startswith(answer["reasoning"].rstrip())
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_an_answer_that_ends_inside_the_reasoning(qwen: RunningFront):
    qwen.reply(THOUGHT)
    answer = both(qwen)
    assert (answer["content"], answer["reasoning"], answer["reason"]) == ("", THOUGHT, "stop")
    num_reasoning = num_tokens(qwen, THOUGHT)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    assert answer["usage"]["completion_tokens"] == num_reasoning + 1, "the end token belongs to neither"


def test_a_stop_string_and_logprobs_beside_reasoning(qwen: RunningFront):
    qwen.worker.logprobs = lambda token, settings: TokenLogprobs(-0.5, (token,), (-0.5,))
    plain = both(qwen)
    answer = both(qwen, stop=["llo"])
    assert (answer["content"], answer["reasoning"], answer["reason"]) == (" He", THOUGHT, "stop")
    details = plain["usage"]["completion_tokens_details"]
    assert answer["usage"]["completion_tokens_details"] == details
    answer = both(qwen, stop=["nothing", "😀😀"], logprobs=True)
    assert (answer["content"], answer["usage"]["completion_tokens_details"]) == (" Hello 😀", details)
    entries = qwen.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    shown = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert shown == f"{THOUGHT}\n</think>\n\n Hello 😀", "every token has its logprobs, reasoning included"
    stream = qwen.stream(logprobs=True)
    logs = [entry["logprobs"]["content"] for chunk in stream.chunks for entry in chunk["choices"] if entry["logprobs"]]
    assert [e["bytes"] for log in logs for e in log] == [entry["bytes"] for entry in entries]
    assert both(qwen, stop=["wants"])["content"] == "", "stop strings are found in the reasoning too"


def test_the_client_sees_reasoning(client: openai.OpenAI):
    answer = client.chat.completions.create(model=MODEL, messages=[USER])
    assert answer.choices[0].message.model_extra == {"reasoning_content": THOUGHT}
    assert answer.usage.completion_tokens_details.reasoning_tokens > 5
    stream = client.chat.completions.create(model=MODEL, messages=[USER], stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == " Hello 😀"


def test_an_unfinished_thought_is_continued(qwen: RunningFront):
    messages = [USER, {"role": "assistant", "content": "<think>\nThe user"}]
    qwen.reply(" wants.\n</think>\n\nYes")
    answer = both(qwen, messages=messages, continue_final_message=True)
    assert (answer["reasoning"], answer["content"]) == (" wants.", "Yes")
    messages[-1]["content"] = "It is"
    qwen.reply(" so </think>")
    assert both(qwen, messages=messages, continue_final_message=True)["content"] == " so </think>"


def test_text_completions_are_not_taken_apart(qwen: RunningFront):
    qwen.reply(f"a </think> {CALLS}")
    assert qwen.complete(max_tokens=300).json()["choices"][0]["text"] == f"a </think> {CALLS}"


def test_tool_calls(qwen: RunningFront):
    """C5."""
    qwen.reply(f"{THOUGHT}\n</think>\n\nLooking.\n\n{CALLS}")
    answer = both(qwen, tools=[WEATHER])
    assert (answer["content"], answer["reasoning"], answer["reason"]) == ("Looking.", THOUGHT, "tool_calls")
    assert [name for name, _ in answer["calls"]] == ["weather", "weather"]
    assert [json.loads(arguments) for _, arguments in answer["calls"]] == ARGUMENTS
    assert json.dumps(WEATHER) in prompt_text(qwen)
    assert both(qwen, tools=[WEATHER], tool_choice="auto", stop=["never this"])["calls"] == answer["calls"]
    several = qwen.chat(tools=[WEATHER], n=2).json()["choices"]
    ids = [call["id"] for choice in several for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4 and all(choice["finish_reason"] == "tool_calls" for choice in several)


def test_calls_alone_have_null_content(qwen: RunningFront):
    qwen.reply(CALLS)
    fields = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": False}}
    assert both(qwen, **fields)["content"] == ""
    assert qwen.chat(**fields).json()["choices"][0]["message"]["content"] is None


def test_without_tools_a_call_is_text(qwen: RunningFront):
    qwen.reply(CALLS)
    off = {"enable_thinking": False}
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
        answer = both(qwen, chat_template_kwargs=off, **fields)
        assert (answer["content"], answer["calls"], answer["reason"]) == (CALLS, [], "stop")
        assert "weather" not in prompt_text(qwen)


def test_a_call_that_is_cut(qwen: RunningFront):
    """A12: a limit is a limit, a stop string ends the text, and neither makes a call of a part."""
    qwen.reply(CALLS)
    fields = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": False}}
    limit = num_tokens(qwen, CALLS.partition("Paulo")[0])
    answer = both(qwen, max_tokens=limit, **fields)
    assert answer["reason"] == "length" and answer["calls"][0][1].startswith('{"city":"S')
    answer = both(qwen, stop=["Paulo"], **fields)
    assert answer["reason"] == "stop" and answer["calls"] == [["weather", '{"city":"São \\"']]
    answer = both(qwen, stop=["</tool_call>"], **fields)
    assert answer["reason"] == "tool_calls" and json.loads(answer["calls"][0][1]) == ARGUMENTS[0]


def test_the_client_and_its_stream_helper_see_calls(client: openai.OpenAI, qwen: RunningFront):
    qwen.reply(f"so\n</think>\n\n{CALLS}")
    message = client.chat.completions.create(model=MODEL, messages=[USER], tools=[WEATHER]).choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == ARGUMENTS
    with client.chat.completions.stream(model=MODEL, messages=[USER], tools=[WEATHER]) as stream:
        stream.until_done()
        final = stream.get_final_completion().choices[0]
    assert [json.loads(call.function.arguments) for call in final.message.tool_calls] == ARGUMENTS
    assert final.finish_reason == "tool_calls"
    results = [{"role": "tool", "content": "warm", "tool_call_id": call.id} for call in message.tool_calls]
    qwen.reply("done\n</think>\n\nIt is warm.")
    again = client.chat.completions.create(model=MODEL, messages=[USER, message, *results], tools=[WEATHER])
    assert again.choices[0].message.content == "It is warm."
    prompt = prompt_text(qwen)
    assert CALLS in prompt and "<think>\nso\n</think>" in prompt and prompt.count("<tool_response>\nwarm") == 2


def test_reasoning_of_earlier_turns_reaches_the_template(qwen: RunningFront):
    """The template keeps the reasoning that led to calls, and leaves out what is before the last question."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turn = {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call]}
    result = {"role": "tool", "content": "cold", "tool_call_id": "c"}
    qwen.chat(messages=[USER, turn, result], max_tokens=1)
    assert "<think>\nI look.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n" in prompt_text(
        qwen
    )
    qwen.chat(messages=[USER, turn, result, USER], max_tokens=1)
    assert "I look." not in prompt_text(qwen)
    text = {"role": "assistant", "content": "", "reasoning_content": "Only thoughts."}
    assert qwen.chat(messages=[USER, text, USER], max_tokens=1).status_code == 200


def call_with(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


def strict_tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": None}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "whether"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [WEATHER, {"type": "function", "function": {"name": "f g"}}]}, "tools[1].function.name"),
    ({"tools": [strict_tool({"not": {}})]}, "tools"),
    ({"tools": [strict_tool({"properties": {"a": {"type": "array", "uniqueItems": True}}})]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"messages": call_with("{")}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": call_with("[]")}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": call_with("[" * 100_000)}, "messages[1].tool_calls[0].function.arguments"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_cannot_be_honoured_is_named(qwen: RunningFront, fields: dict[str, Any], param: str):
    answer = qwen.chat(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"], error


def test_their_legal_neighbours(qwen: RunningFront):
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": True, "add_vision_id": True}},
        {"chat_template_kwargs": {}},
        {"tools": [{"type": "function", "function": {"name": "f.g:h-1", "strict": False, "parameters": None}}]},
        {"tools": [WEATHER], "parallel_tool_calls": True},
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": [strict_tool({"properties": {"a": {"type": "array"}}})]},
        {"messages": [*call_with(""), {"role": "tool", "content": "x", "tool_call_id": "c"}]},
    ):
        assert qwen.chat(max_tokens=2, **fields).status_code == 200, fields


JSON_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
FORMS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"tools": [WEATHER]}, None),
    ({"tools": [WEATHER], "tool_choice": "none", "parallel_tool_calls": False}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, "json_schema"),
    ({"response_format": JSON_FORM}, "json_schema"),
    ({"response_format": JSON_FORM, "tools": [WEATHER]}, "or"),
    ({"response_format": JSON_FORM, "tools": [WEATHER], "tool_choice": "required"}, "tags_with_separator"),
    ({"tools": [WEATHER], "tool_choice": "required"}, "tags_with_separator"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tag"),
    ({"tools": [WEATHER], "parallel_tool_calls": False}, "triggered_tags"),
    ({"tools": [strict_tool({"properties": {"a": {}}})]}, "triggered_tags"),
    ({"guided_choice": ["a", "b"]}, "or"),
    ({"guided_json": '{"type": "integer"}'}, "json_schema"),
    ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema"),
    ({"structured_outputs": {"json_object": True}}, "json_schema"),
    ({"structured_outputs": {"json_object": False}}, None),
]


@pytest.mark.parametrize(("fields", "kind"), FORMS)
def test_what_a_request_asks_of_its_text_goes_to_the_worker(
    qwen: RunningFront, fields: dict[str, Any], kind: str | None
):
    for thinks in (True, False):
        answer = qwen.chat(max_tokens=1, chat_template_kwargs={"enable_thinking": thinks}, **fields)
        assert answer.status_code == 200, answer.text
        grammar = qwen.openings()[-1].sampling.grammar
        if kind is None:
            assert grammar is None
        else:
            assert grammar is not None and json.loads(grammar.format)["type"] == kind
            assert grammar.behind == ("</think>" if thinks else ""), "it holds for the answer"


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
def test_a_url_that_is_not_in_an_object_is_told_where_it_belongs(qwen: RunningFront, kind: str):
    message = {"role": "user", "content": [{"type": kind, kind: "data:image/png;base64,AAAA"}]}
    error = qwen.chat(messages=[message]).json()["error"]
    assert error["param"] == f"messages[0].content[0].{kind}"
    assert error["message"].endswith("it must be an object with url, not the URL itself")
    message["content"] = [{"type": kind, kind: 5}]
    assert qwen.chat(messages=[message]).json()["error"]["message"].endswith("it must be an object")


def test_tokenize_counts_what_a_chat_would(qwen: RunningFront):
    fields = {"messages": [USER], "tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": False}}
    answer = qwen.http.post("/tokenize", json=fields).json()
    assert answer["count"] == qwen.chat(max_tokens=1, **fields).json()["usage"]["prompt_tokens"]
    error = qwen.http.post("/tokenize", json={"prompt": "x", "tools": [WEATHER]}).json()["error"]
    assert error["param"] == "tools"


def test_models_tell_what_they_can(qwen: RunningFront, front: RunningFront):
    entry = qwen.http.get("/v1/models").json()["data"][0]
    assert entry["modalities"]["input"] == ["text", "image", "video"]
    assert entry["capabilities"] == {"reasoning": True, "tool_calls": True}
    plain = front.http.get("/v1/models").json()["data"][0]
    assert plain["modalities"]["input"] == ["text"]
    assert plain["capabilities"] == {"reasoning": False, "tool_calls": False}


def test_a_model_without_them_says_so(front: RunningFront):
    for fields, param in (
        ({"tools": [WEATHER]}, "tools"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ):
        answer = front.chat(**fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert "completion_tokens_details" not in front.chat().json()["usage"]
