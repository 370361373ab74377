"""Formats of xgrammar's structural tags, as JSON values: the pieces that grammars are put together from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar.api_server.grammar.schema_rules import Schema, enforceable

MAX_WHITESPACE = 12
"""Between two parts of a JSON text, in characters: a line break with an indentation. Without an end, some models find
none."""

Format = dict[str, Any]


def json_text(schema: Any) -> Format:
    """JSON that is valid by the schema. Raises `SchemaError`."""
    return rewritten_json(enforceable(schema))


def rewritten_json(schema: Schema) -> Format:
    """As `json_text`, of a schema that `enforceable` has made."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def regular(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def context_free(grammar: str) -> Format:
    """`grammar` in EBNF with the rule `root`."""
    return {"type": "grammar", "grammar": grammar}


def literal(text: str) -> Format:
    return {"type": "const_string", "value": text}


def one_of(options: Sequence[Format]) -> Format:
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def sequence(parts: Sequence[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def optional(part: Format) -> Format:
    return {"type": "optional", "content": part}


def until(begin: str, end: str, *, without: str = "", most: int | None = None) -> Format:
    """`begin`, any text without `end` and `without`, of up to `most` characters, and `end`. A character that is made of
    several tokens counts as so many."""
    content: Format = {"type": "any_text"}
    if without:
        content["excludes"] = [without]
    if most is not None:
        content["max_chars"] = most
    return enclosed(begin, content, end)


def enclosed(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
