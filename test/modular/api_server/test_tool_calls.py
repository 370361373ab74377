"""Tool calls and reasoning in text that arrives in any pieces, against readings of the whole text."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.api_server.answer.argument_kinds import KINDS, argument_kinds, json_value
from mstar.api_server.answer.deltas import ContentDelta, ReasoningDelta
from mstar.api_server.answer.reader import AnswerFormat, AnswerReader, WholeAnswer
from mstar.model.base import Markers

THINK = Markers("<think>", "</think>")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "exact": {"type": "boolean"},
        "where": {"type": "object"},
        "tags": {"type": "array"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "mode": {"$ref": "#/$defs/Mode"},
        "any": {},
    },
    "$defs": {"Mode": {"enum": ["fast", "slow"]}},
}
TOOLS = {"weather": PARAMETERS, "noargs": {}}


def read(
    pieces: list[str],
    *,
    opens: bool = False,
    reasoning: bool = False,
    tools: bool = True,
    whole: bool = True,
    shortcuts: bool = False,
):
    """(content, reasoning, calls as (name, arguments), finish reason) of a text in pieces. `shortcuts`: what passes
    as it is does."""
    ids = iter(range(1000))
    form = AnswerFormat(THINK if reasoning else None, TOOLS if tools else None)
    reader = AnswerReader(form, opens_reasoning=opens, new_id=lambda: f"call_{next(ids)}")
    answer = WholeAnswer()
    for piece in filter(None, pieces):
        if shortcuts and reader.passes_as_content(piece):
            answer.add(ContentDelta(piece))
            continue
        if shortcuts and reader.passes_as_reasoning(piece):
            answer.add(ReasoningDelta(piece))
            continue
        for delta in reader.feed(piece):
            assert getattr(delta, "text", "x"), "no delta is empty"
            answer.add(delta)
    for delta in reader.finish(is_whole=whole):
        answer.add(delta)
    assert [call.call_id for call in answer.calls] == [f"call_{i}" for i in range(len(answer.calls))]
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.content, answer.reasoning, calls, reader.reason("stop" if whole else "length")


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def call(name: str, *values: tuple[str, str]) -> str:
    """As chat templates write it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


VALUES = [
    ("city", "Paris", "Paris"),
    ("city", "", ""),
    ("city", "two\nlines\n\n  indented\n", "two\nlines\n\n  indented\n"),
    ("city", 'quote " backslash \\ tab \t 你好 😀', 'quote " backslash \\ tab \t 你好 😀'),
    ("city", "<b>a</b> </param <parameter", "<b>a</b> </param <parameter"),
    ("city", "5", "5"),
    ("city", "null", "null"),
    ("days", "3", 3),
    ("days", "-12345678901234567890", -12345678901234567890),
    ("days", "3.0", 3),
    ("days", "three", "three"),
    ("ratio", "0.1", 0.1),
    ("ratio", "-1.5e-3", -1.5e-3),
    ("ratio", "7", 7),
    ("ratio", "NaN", "NaN"),
    ("ratio", "1e999", "1e999"),
    ("exact", "true", True),
    ("exact", "False", False),
    ("exact", "yes", "yes"),
    ("where", '{"lat": 1.5, "names": ["a", {"b": null}]}', {"lat": 1.5, "names": ["a", {"b": None}]}),
    ("where", "{'lat': 1}", "{'lat': 1}"),
    ("tags", '[\n  "x",\n  2\n]', ["x", 2]),
    ("tags", "[]", []),
    ("note", "null", None),
    ("note", "nullify", "nullify"),
    ("note", "None", "None"),
    ("note", "", ""),
    ("note", "nu", "nu"),
    ("note", "5", "5"),
    ("limit", "None", None),
    ("limit", "10", 10),
    ("mode", "fast", "fast"),
    ("any", "5", 5),
    ("any", "words", "words"),
    ("any", '{"a": 1}', {"a": 1}),
    ("unknown", "true", True),
    ("unknown", "text", "text"),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_values_have_the_types_of_the_schema(key: str, text: str, value: Any, size: int):
    """C5."""
    content, _, calls, reason = read(cut(call("weather", (key, text)), size))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", {key: value})]
    assert (content, reason) == ("", "tool_calls")
    assert type(json.loads(calls[0][1])[key]) is type(value)


@pytest.mark.parametrize("size", [1, 2, 3, 10_000])
def test_two_calls_and_text_around_them(size: int):
    text = (
        "Let me see. \n\n" + call("weather", ("city", "Paris"), ("days", "2")) + "\n" + call("noargs") + "\n\nDone.\n"
    )
    content, _, calls, reason = read(cut(text, size))
    assert content == "Let me see.Done." and reason == "tool_calls"
    assert calls == [("weather", '{"city":"Paris","days":2}'), ("noargs", "{}")]


FAR = "<tool_call>" + " " * 300 + "<function=noargs></function>"
UNUSUAL = {
    "no line breaks": ("<tool_call><function=weather><parameter=city>a</parameter></function></tool_call>", "", 1),
    "no end of the call": ("<tool_call>\n<function=noargs>\n</function>\n", "", 1),
    "no end of the function": ("<tool_call>\n<function=noargs>\n</tool_call>", "", 1),
    "two functions in one call": ("<tool_call>" + 2 * "<function=noargs></function>" + "</tool_call>", "", 2),
    "words after a call": (call("noargs") + "\n and more ", "and more", 1),
    "not a call": ("Write <tool_call> to call.", "Write <tool_call> to call.", 0),
    "not a function": ("<tool_call>\n{\"name\": 1}\n</tool_call>", "<tool_call>\n{\"name\": 1}\n</tool_call>", 0),
    "a function and nothing": ("<tool_call>\n<function=weather> city", "<tool_call>\n<function=weather> city", 0),
    "no name": ("<tool_call><function=></function></tool_call>", "<tool_call><function=></function></tool_call>", 0),
    "only the beginning": ("ends with <tool_call>\n<func", "ends with <tool_call>\n<func", 0),
    "a marker inside a marker": ("<tool_<tool_call>\n<function=noargs>\n</function>", "<tool_", 1),
    "a marker after no call": ("<tool_call><tool_call><function=noargs></function>", "<tool_call>", 1),
    "white space only": (" \n ", " \n ", 0),
    "a long gap": (FAR, FAR, 0),
    "a long name": ("<tool_call><function=" + "n" * 300 + ">", "<tool_call><function=" + "n" * 300 + ">", 0),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 10_000])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_texts(name: str, size: int):
    text, content, num_calls = UNUSUAL[name]
    got, _, calls, reason = read(cut(text, size))
    assert (got, len(calls), reason) == (content, num_calls, "tool_calls" if num_calls else "stop")
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("end", range(1, len(call("weather", ("city", "Paris"), ("days", "12")))))
def test_an_answer_that_ends_inside_a_call(end: int):
    """By the model's own end it has what came; cut by a limit it is left as it is, and no reason to call anything."""
    text = call("weather", ("city", "Paris"), ("days", "12"))[:end]
    _, _, calls, reason = read([text])
    if calls:
        arguments = json.loads(calls[0][1])
        assert reason == "tool_calls" and "Paris".startswith(arguments.get("city", ""))
    _, _, calls, reason = read([text], whole=False)
    assert reason == "length"
    if "</function>" not in text and calls:
        with pytest.raises(ValueError):
            json.loads(calls[0][1])


ALPHABET = [
    "<tool_call>", "</tool_call>", "<function=", "weather", ">", "\n", " ", "</function>", "<parameter=", "city", "</",
    "</parameter>", "<", "a", "null", "5", "<think>", "</think>", "days", '"', "<tool_call>\n<function=weather>\n",
    "<parameter=note>\n", "<parameter=limit>\n", "\n</parameter>\n", "</function>\n</tool_call>", call("noargs"),
]  # fmt: skip


@given(st.lists(st.sampled_from(ALPHABET), max_size=24), st.data())
def test_pieces_do_not_matter(words: list[str], data: st.DataObject):
    """Whatever the text is, the answer is that of the text in one piece."""
    text = "".join(words)
    options = {name: data.draw(st.booleans()) for name in ("opens", "reasoning", "tools", "whole")}
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, **options, shortcuts=data.draw(st.booleans())) == read([text], **options)


@given(
    st.lists(st.sampled_from(["<tool_call>", "<function=f>", "\n", " ", "x", "</tool_call>", "<", "a b"]), max_size=16)
)
def test_text_without_a_call_is_kept_as_it_is(words: list[str]):
    text = "".join(words)
    content, _, calls, _ = read(cut(text, 2))
    if not calls:
        assert content == text


def whole_split(text: str, opens: bool) -> tuple[str, str]:
    """(reasoning, content) by regular expressions on the whole text."""
    begin = re.match(r"\s*<think>", text)
    if begin is None and not opens:
        return "", text
    inside = (text if begin is None else text[begin.end() :]).lstrip("\n")
    reasoning, marker, content = inside.partition("</think>")
    return (reasoning.rstrip("\n"), content.lstrip("\n")) if marker else (reasoning, "")


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "\n", " ", "a", "</thi", "\n\n"]), max_size=16),
    st.data(),
)
def test_reasoning_is_told_apart(words: list[str], data: st.DataObject):
    text, opens = "".join(words), data.draw(st.booleans())
    reasoning, content = whole_split(text, opens)
    shortcuts = data.draw(st.booleans())
    got = read(cut(text, data.draw(st.integers(1, 9))), opens=opens, reasoning=True, tools=False, shortcuts=shortcuts)
    assert got[:2] == (content, reasoning)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_ends_where_its_marker_does(size: int):
    """Whatever way the text came, shortcuts included."""
    form = AnswerFormat(THINK, None)
    text = "some thoughts here</think>and the answer"
    reader = AnswerReader(form, opens_reasoning=True, new_id=str)
    for piece in cut(text, size):
        if not (reader.passes_as_content(piece) or reader.passes_as_reasoning(piece)):
            reader.feed(piece)
    found = [reader.has_reasoning_at(i) for i in range(len(text))]
    assert found.index(False) == text.index("and the") and not any(found[text.index("and the") :])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_then_a_call(size: int):
    text = "I need <tool_call> here.\n</think>\n\nLooking.\n\n" + call("weather", ("city", "Oslo"))
    content, reasoning, calls, reason = read(cut(text, size), opens=True, reasoning=True)
    assert (content, reasoning) == ("Looking.", "I need <tool_call> here.")
    assert calls == [("weather", '{"city":"Oslo"}')] and reason == "tool_calls"


SCHEMAS: list[tuple[Any, set[str]]] = [
    ({"type": ["string", "null"]}, {"string", "null"}),
    ({"const": 5}, {"integer"}),
    ({"enum": [1.5, None, [], {}, True]}, {"number", "null", "array", "object", "boolean"}),
    ({"allOf": [{"description": "x"}, {"type": "integer"}]}, {"integer"}),
    ({"oneOf": [{"type": "integer"}, {}]}, set(KINDS)),
    ({"properties": {}}, {"object"}),
    ({"items": {}}, {"array"}),
    ({"$ref": "#/properties/x"}, set(KINDS)),
    ({"$ref": "http://example.com/#"}, set(KINDS)),
    ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
    ({"type": "nonsense"}, set(KINDS)),
    ({"type": 5, "anyOf": 7, "enum": {}}, set(KINDS)),
    (None, set(KINDS)),
    (True, set(KINDS)),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "kinds"), SCHEMAS)
def test_kinds_of_schemas(schema: Any, kinds: set[str]):
    parameters = {"properties": {"x": schema}, "$defs": {"a/b": {"type": "boolean"}}}
    assert argument_kinds(parameters, "x") == kinds


def test_further_arguments_may_have_a_schema_of_their_own():
    assert argument_kinds({"additionalProperties": {"type": "integer"}}, "x") == {"integer"}
    assert argument_kinds({"properties": []}, "x") == KINDS


def test_a_schema_that_doubles_itself_is_bounded():
    tree: Any = {"$ref": "#/$defs/x"}
    parameters = {"properties": {"x": tree}, "$defs": {"x": {"anyOf": [tree, tree, tree]}}}
    assert argument_kinds(parameters, "x") == KINDS


@given(st.text(), st.sets(st.sampled_from(sorted(KINDS))))
def test_every_value_is_json(text: str, kinds: set[str]):
    json.loads(json_value(text, frozenset(kinds)), parse_constant=pytest.fail)
