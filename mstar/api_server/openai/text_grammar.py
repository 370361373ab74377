"""The one grammar of a request: what its response format, its guided fields and its tools ask of the text. Pure; raises
`RefusedError` naming the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from mstar.api_server.errors import bad_request
from mstar.api_server.grammar import patterns
from mstar.api_server.grammar.call_formats import CallableTool, calls, text_with_calls
from mstar.api_server.grammar.formats import Format, context_free, json_text, literal, one_of, regular
from mstar.api_server.grammar.schema_error import SchemaError
from mstar.api_server.openai.fields import GenerationFields
from mstar.communication.messages import Grammar
from mstar.model.base import Markers

MAX_FORMAT_BYTES = 256 << 10
JSON_OBJECT = {"type": "object"}


class FormWish(NamedTuple):
    """A field that says what the text is; `build` may raise `SchemaError`."""

    field: str
    build: Callable[[], Format]


class CallRules(NamedTuple):
    """What the tools of a request ask of the text. `must_call`: nothing but calls; `only_one`: not several."""

    tools: tuple[CallableTool, ...]
    must_call: bool
    only_one: bool


def request_grammar(
    body: GenerationFields, wishes: Sequence[FormWish], rules: CallRules | None, reasoning: Markers | None
) -> Grammar | None:
    """`wishes`: those that not all requests can have. `reasoning`: it comes before all that is constrained."""
    behind = "" if reasoning is None else reasoning.closing
    wishes = [*_guided(body), *wishes]
    if len(wishes) > 1:
        first, second = wishes[0].field, wishes[1].field
        raise bad_request(f"{first} and {second} both say what the text is; give one of them.", second)
    if rules is None:
        return _grammar(_built(wishes[0]), wishes[0].field, behind) if wishes else None
    most = "one" if rules.only_one else "any"
    calling = FormWish("tools", lambda: calls(rules.tools, most=most))
    if rules.must_call:
        form = _built(calling)
    elif wishes:
        form = one_of([_built(wishes[0]), _built(calling)])
    elif rules.only_one or any(tool.strict for tool in rules.tools):
        form = _built(FormWish("tools", lambda: text_with_calls(rules.tools, most=most)))
    else:
        return None
    return _grammar(form, wishes[0].field if wishes else "tools", behind)


def _guided(body: GenerationFields) -> Iterator[FormWish]:
    guided: dict[str, Any] = {
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    if (outputs := body.structured_outputs) is not None:
        guided.update({f"structured_outputs.{name.rstrip('_')}": value for name, value in outputs})
    for field, value in guided.items():
        if value is None:
            continue
        match field.replace("structured_outputs.", "guided_"):
            case "guided_json":
                yield FormWish(field, lambda value=value: json_text(_schema_of(value)))
            case "guided_json_object":
                if value:
                    yield FormWish(field, lambda: json_text(JSON_OBJECT))
            case "guided_regex":
                yield FormWish(field, lambda value=value: _regular(value))
            case "guided_choice":
                yield FormWish(field, lambda value=value: one_of([literal(text) for text in dict.fromkeys(value)]))
            case _:
                yield FormWish(field, lambda value=value: _context_free(value))


def _regular(pattern: str) -> Format:
    if why := patterns.why_not_whole(pattern):
        raise SchemaError("", f"the pattern cannot be enforced: it {why}")
    return regular(pattern)


def _context_free(grammar: str) -> Format:
    if why := patterns.why_no_text(grammar):
        raise SchemaError("", f"the grammar cannot be enforced: it {why}")
    return context_free(grammar)


def _schema_of(value: Any) -> Any:
    """A schema may come as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        raise SchemaError("", "it is neither an object nor JSON text of one") from None


def _built(wish: FormWish) -> Format:
    try:
        return wish.build()
    except SchemaError as error:
        place = f"{error.path.lstrip('.')}: " if error.path else ""
        raise bad_request(f"{wish.field}: {place}{error}", wish.field) from None


def _grammar(form: Format, field: str, behind: str) -> Grammar:
    text = msgspec.json.encode(form)
    if len(text) > MAX_FORMAT_BYTES:
        raise bad_request(f"{field} is too large: {len(text)} bytes of grammar, {MAX_FORMAT_BYTES} are allowed.", field)
    return Grammar(format=text.decode(), behind=behind, field=field)
