"""Tool calls as a grammar: the form with tags that `mstar.api_server.answer.function_tags` reads. Pure.

Parameters come in the order of the tool's schema, each at most once. A text parameter goes on until its closing tag;
others are JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mstar.api_server.answer.argument_kinds import argument_kinds
from mstar.api_server.answer.function_tags import CALL, END_CALL, END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER
from mstar.api_server.grammar import patterns
from mstar.api_server.grammar.formats import (
    Format,
    enclosed,
    literal,
    one_of,
    optional,
    regular,
    rewritten_json,
    sequence,
    until,
)
from mstar.api_server.grammar.schema_error import SchemaError
from mstar.api_server.grammar.schema_rules import Schema, enforceable


@dataclass(frozen=True, slots=True)
class CallableTool:
    """`parameters`: JSON schema of the arguments. `strict`: they must be valid by it; else what cannot be enforced of
    it is left to the model."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool


def calls(tools: Sequence[CallableTool], *, most: Literal["one", "any"]) -> Format:
    """Calls of these tools and nothing else, at least one. Raises `SchemaError`."""
    if most == "one":
        return one_of([_call(tool) for tool in tools])
    return {
        "type": "tags_with_separator",
        "tags": [_call(tool) for tool in tools],
        "separator": "\n",
        "at_least_one": True,
    }


def text_with_calls(tools: Sequence[CallableTool], *, most: Literal["one", "any"]) -> Format:
    """Any text; where a call begins in it, it is one of these tools. Raises `SchemaError`."""
    return {
        "type": "triggered_tags",
        "triggers": [CALL],
        "tags": [_call(tool) for tool in tools],
        "stop_after_first": most == "one",
    }


def _call(tool: CallableTool) -> Format:
    try:
        parts = _parameters(tool, enforceable(_object(tool.parameters)))
    except SchemaError as error:
        if tool.strict:
            raise SchemaError(error.path, f"{error} (of {tool.name}, which is strict)") from None
        parts = _parameters(tool, _loosened(tool.parameters))
    return enclosed(f"{CALL}\n{FUNCTION}{tool.name}>\n", sequence([*parts, literal(END_FUNCTION + "\n")]), END_CALL)


def _object(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whether or not their schema says so."""
    return parameters if "type" in parameters or "$ref" in parameters else {"type": "object", **parameters}


def _loosened(parameters: Mapping[str, Any]) -> Schema:
    """The names of the parameters, and of which kinds they are."""
    properties, required = parameters.get("properties"), parameters.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    kinds = {name: argument_kinds(parameters, name) for name in names}
    return {
        "type": "object",
        "properties": {name: _of_kinds(kinds[name]) for name in names},
        "required": [name for name in required if name in names] if isinstance(required, list) else [],
    }


def _of_kinds(kinds: frozenset[str]) -> Schema:
    options = [{"type": kind} for kind in sorted(kinds)]
    return {} if "string" in kinds else options[0] if len(options) == 1 else {"anyOf": options}


def _parameters(tool: CallableTool, schema: Schema) -> list[Format]:
    definitions = schema.get("$defs", {})
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if beyond := sorted(set(schema) - {"type", "properties", "required", "additionalProperties", "$defs"}):
        raise SchemaError(f".{beyond[0]}", f"{beyond[0]!r} of all arguments together cannot be enforced")
    required = schema.get("required", ())
    parts: list[Format] = []
    for name, rules in schema.get("properties", {}).items():
        if not name or any(mark in name for mark in "<>\n"):
            raise SchemaError(f".properties.{name}", "a parameter with such a name cannot be called for")
        part = _parameter(name, rules, definitions)
        parts.append(part if name in required else optional(part))
    return parts


def _parameter(name: str, rules: Schema, definitions: Schema) -> Format:
    begin, end = f"{PARAMETER}{name}>\n", f"{END_PARAMETER}\n"
    while "$ref" in rules:
        rules = definitions[rules["$ref"].rpartition("/")[2]]
    if _may_be_any_text(rules):
        return until(begin, end)
    end = "\n" + end
    if rules.get("type") == "string":
        return sequence([literal(begin), *_text(rules, end)])
    values = rules.get("enum")
    if values is not None and all(isinstance(value, str) for value in values):
        if any(END_PARAMETER in value for value in values):
            raise SchemaError(f".properties.{name}.enum", "such a value cannot be written in a call")
        return enclosed(begin, one_of([literal(value) for value in values]), end)
    if _has_texts(rules):
        raise SchemaError(f".properties.{name}", "texts under rules beside other values cannot be enforced in a call")
    return enclosed(begin, rewritten_json({**rules, "$defs": definitions} if definitions else rules), end)


def _may_be_any_text(rules: Schema) -> bool:
    """A text without rules of its own is valid, so that whatever is written is."""
    if not rules or rules == {"type": "string"}:
        return True
    return any(_may_be_any_text(option) for option in rules.get("anyOf", ()))


def _has_texts(rules: Schema) -> bool:
    """A text may stand there, which would not be written as JSON."""
    if "anyOf" in rules:
        return any("$ref" in option or _has_texts(option) for option in rules["anyOf"])
    return rules.get("type") == "string" or any(isinstance(value, str) for value in rules.get("enum", ()))


def _text(rules: Schema, end: str) -> list[Format]:
    """A text, and `end`. Of one that is not to be short, the first characters are on one line without a tag, so that
    what ends it cannot begin among them."""
    if "pattern" in rules:
        return [regular(patterns.without_anchors(rules["pattern"])), literal(end)]
    if "format" in rules:
        raise SchemaError(".format", f"the format {rules['format']} cannot be enforced in a call")
    least, most = rules.get("minLength", 0), rules.get("maxLength")
    rest = until("", end, without=END_PARAMETER, most=None if most is None else most - least)
    return [regular(rf"[^<\n]{{{least}}}"), rest] if least else [rest]
