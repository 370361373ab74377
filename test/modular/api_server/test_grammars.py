"""Which grammar a request asks for: schemas that can be enforced, tools, and the errors of those that cannot."""

import contextlib
import json
import re
import time
from typing import Any

import pytest
from support.constrained_texts import SCHEMAS

from mstar.api_server.grammar import patterns
from mstar.api_server.grammar.call_formats import CallableTool, calls, text_with_calls
from mstar.api_server.grammar.schema_error import SchemaError
from mstar.api_server.grammar.schema_rules import enforceable

REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"properties": {"a": {"not": {}}}}, ".properties.a.not"),
    "if": ({"if": {}, "then": {}}, ".if"),
    "unique": ({"items": {"type": "array", "uniqueItems": True}}, ".items.uniqueItems"),
    "contains": ({"contains": {}}, ".contains"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf"),
    "oneOf with an optional const": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": 1}}},
                {"type": "object", "properties": {"k": {"const": 2}}},
            ]
        },
        ".oneOf",
    ),
    "allOf that disagrees": ({"allOf": [{"minimum": 1}, {"minimum": 2}]}, ".allOf"),
    "closed allOf": (
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        ".allOf",
    ),
    "no list of names": ({"allOf": [{"required": "a"}, {"required": ["b"]}]}, ".required"),
    "no map of properties": ({"allOf": [{"properties": 1}, {"properties": {"a": {}}}]}, ".properties"),
    "types that exclude each other": ({"allOf": [{"type": ["null"]}, {"type": ["number"]}]}, ".allOf"),
    "branches of no form": ({"oneOf": [{"type": "object", "required": 1}, {"type": "object"}]}, ".required"),
    "types of no form": ({"oneOf": [{"type": [{}]}, {"type": [[]]}]}, ".type"),
    "format of no form": ({"type": "string", "format": {}}, ".format"),
    "endless number": ({"type": "integer", "minimum": 10**400}, ".minimum"),
    "no number between": ({"type": "number", "minimum": 1e-300, "maximum": 1e-299}, ""),
    "many multiples": ({"type": "integer", "minimum": 0, "multipleOf": 10}, ".multipleOf"),
    "large multiple": ({"type": "integer", "multipleOf": 10**6}, ".multipleOf"),
    "look-around": ({"pattern": "^(?!a)[a-z]$"}, ".pattern"),
    "long pattern": ({"pattern": "a" * 5000}, ".pattern"),
    "anchor": ({"items": {"$ref": "#a"}, "$defs": {"b": {"$anchor": "a"}}}, ".items.$ref"),
    "itself by a union": ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, ".$ref"),
    "fractions": ({"type": "number", "multipleOf": 0.5}, ".multipleOf"),
    "two rules of a string": ({"pattern": "^a+$", "maxLength": 3}, ""),
    "escaped pattern": ({"pattern": '^"$'}, ".pattern"),
    "nothing but what JSON escapes": ({"pattern": r'^a["\t\x00-\x1f]+$'}, ".pattern"),
    "escape without meaning": ({"pattern": r"^[a\Z]+$"}, ".pattern"),
    "anchored middle": ({"pattern": "a$|b"}, ".pattern"),
    "unknown standard format": ({"format": "regex", "type": "string"}, ".format"),
    "elsewhere": ({"$ref": "http://example.com/x"}, ".$ref"),
    "nowhere": ({"$ref": "#/$defs/x"}, ".$ref"),
    "itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ".$ref"),
    "beside a reference": ({"$defs": {"a": {}}, "items": {"$ref": "#/$defs/a", "minimum": 1}}, ".items.minimum"),
    "required and forbidden": ({"required": ["a"], "additionalProperties": False}, ".required"),
    "nothing": (False, ""),
    "no schema": ([], ""),
    "type": ({"type": "objekt"}, ".type"),
    "enum of another type": ({"type": "string", "enum": [1]}, ""),
    "negative": ({"type": "array", "minItems": -1}, ".minItems"),
    "dependent": ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_named_by_its_place(name: str):
    schema, path = REFUSED[name]
    with pytest.raises(SchemaError) as raised:
        enforceable(schema)
    assert raised.value.path == path and str(raised.value)


def test_endless_nesting_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(SchemaError):
        enforceable(schema)
    wide = {"properties": {f"p{i}": {"properties": {f"q{j}": {} for j in range(100)}} for i in range(100)}}
    with pytest.raises(SchemaError):
        enforceable(wide)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_rewritten_schema_is_one_that_can_be_enforced(name: str):
    once = enforceable(SCHEMAS[name])
    json.dumps(once)
    again = enforceable(once)
    assert again.keys() == once.keys() and again.get("type") == once.get("type")


def test_what_a_client_sends_costs_the_front_process_little():
    closing = {"type": "object", "properties": {"k": {"$ref": "#/$defs/a"}}, "required": ["k"]}
    costly: list[Any] = [
        {"oneOf": [{"const": index} for index in range(3000)]},
        {"oneOf": [{"enum": list(range(9000))}, {"enum": list(range(9000, 18000))}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": closing}},
        {"properties": {f"p{index}": {"pattern": "[" * 4096} for index in range(100)}},
        {"pattern": "\\" * 4096},
    ]
    began = time.thread_time()
    for schema in costly:
        with contextlib.suppress(SchemaError):
            enforceable(schema)
    assert time.thread_time() - began < 5  # minutes, where it grows with the square


def test_numbers_are_kept_to_what_can_be_written():
    assert enforceable({"type": "number", "minimum": 1e-7, "exclusiveMaximum": 0.12345678}) == {
        "type": "number",
        "minimum": 0.000001,
        "exclusiveMaximum": 0.123456,
    }
    assert enforceable({"type": "integer", "exclusiveMinimum": 20, "maximum": 40, "multipleOf": 10}) == {
        "enum": [30, 40]
    }
    assert enforceable({"allOf": [{"type": ["integer", "null"]}, {"type": "number"}]}) == {"type": "integer"}
    assert enforceable({"enum": [1, True], "const": True}) == {"enum": [True]}


def test_tools_whose_schema_leads_to_itself_are_refused():
    parameters = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    with pytest.raises(SchemaError):
        calls([CallableTool("f", parameters, strict=True)], most="any")
    calls([CallableTool("f", parameters, strict=False)], most="any")


PATTERNS = [
    ("(ab+)?c", ["c", "abc", "abbc"]),
    (r"v[0-9](\.[0-9]{1,2})?", ["v1", "v1.25"]),
    (r"(?:x+)?[(?]\)?", ["(", "xx?)"]),
    ("a?b", ["b"]),
    (r"\u00e9{1,2}\x62", ["éb", "ééb"]),
    ("(c|b|b{0,2})", ["c", "bb"]),
    (r"(?:x|[y}]{1,2}|\\{2,3}){1,2}z", ["xz", "y}xz"]),
    ("(a|b)??", ["a"]),
    (r"\(a\)?", ["(a", "(a)"]),
]


@pytest.mark.parametrize(("pattern", "words"), PATTERNS)
def test_a_pattern_written_for_the_compiler_means_the_same(pattern: str, words: list[str]):
    written = patterns.compiled(pattern)
    for word in [*words, "", "b", "v12", "x", "(", ")", "ac", "bc"]:
        assert bool(re.fullmatch(pattern, word)) == bool(re.fullmatch(written, word)), (written, word)


@pytest.mark.parametrize("pattern", [r"a\Z", r"[\b]", r"\cA", r"[\xG0]", r"(a)\1", r"[\p{L}]", "a\\"])
def test_escapes_that_the_compiler_takes_for_letters_are_refused(pattern: str):
    assert "escape" in patterns.why_not_whole(pattern) and patterns.why_not_matched(pattern)


@pytest.mark.parametrize(
    "pattern", [r"[a\n]\d\.\-\/[^\\\"\x00-\x1f]", r"\x61\u0061\u{1F600}[\w.\]-]+", r"[\s\S]*[\t-z]"]
)
def test_escapes_that_can_be_enforced(pattern: str):
    assert not patterns.why_not_whole(pattern) and not patterns.why_not_matched(pattern)


@pytest.mark.parametrize(
    "text", [r"a\ud83d", r"\uD83D\uDE00", r"[a\udfff]", r"[\ud800-\udfff]", r"\u{d800}", r"\u{110000}"]
)
def test_numbers_of_no_character_are_refused(text: str):
    """No text in UTF-8 has them, so nothing of the request's text would be left."""
    assert "asks for" in patterns.why_not_whole(text) and "asks for" in patterns.why_not_matched(text)
    assert "asks for" in patterns.why_no_text(f'root ::= "{text}"')


def test_numbers_of_characters_beside_those_are_allowed():
    for text in (r"\ud7ff", r"\ue000", r"\u{1F600}", r"\u{10ffff}", r"[^\ud800-\udfff]", r"\\ud800"):
        assert not patterns.why_not_whole(text), text
    assert not patterns.why_no_text(r'root ::= "\U0010ffff\u{1F600}"') and patterns.why_no_text(
        r'root ::= "\U0000d800"'
    )


def test_formats_are_patterns_of_valid_values():
    good = {
        "date": "2024-02-28",
        "time": "23:59:59.5+02:00",
        "date-time": "1999-12-31T00:00:00Z",
        "ipv4": "0.10.99.255",
    }
    bad = {"date": "2024-02-30", "time": "24:00:00Z", "date-time": "1999-12-31 00:00:00Z", "ipv4": "01.2.3.4"}
    for name in good:
        assert re.match(patterns.FORMATS[name], good[name]) and not re.match(patterns.FORMATS[name], bad[name])


def tool(name: str = "f", *, strict: bool = False, **properties: Any) -> CallableTool:
    return CallableTool(name, {"type": "object", "properties": properties, "required": list(properties)[:1]}, strict)


def test_calls_take_the_parameters_of_the_tool():
    form = calls([tool(a={"type": "string"}, b={"type": "integer"})], most="one")
    assert form["begin"] == "<tool_call>\n<function=f>\n" and form["end"] == "</tool_call>"
    a, b, end = form["content"]["elements"]
    assert end == {"type": "const_string", "value": "</function>\n"}
    assert (a["begin"], a["content"], a["end"]) == ("<parameter=a>\n", {"type": "any_text"}, "</parameter>\n")
    assert b["type"] == "optional" and b["content"]["content"]["json_schema"] == {"type": "integer"}
    assert calls([tool()], most="one")["content"] == end
    assert [one["begin"] for one in calls([tool("f", a={}), tool("g", a={})], most="any")["tags"]] == [
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=g>\n",
    ]
    assert text_with_calls([tool(a={})], most="one")["stop_after_first"] is True


def test_what_cannot_be_enforced_of_a_tool_is_refused_only_where_it_is_strict():
    odd = {"type": "array", "uniqueItems": True}
    form = calls([tool(a=odd)], most="one")
    assert form["content"]["elements"][0]["content"]["json_schema"] == {"type": "array"}
    with pytest.raises(SchemaError, match="strict"):
        calls([tool(strict=True, a=odd)], most="one")
