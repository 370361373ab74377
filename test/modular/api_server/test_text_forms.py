"""Forms that a text is asked to have: what is refused over HTTP, by its field, and which grammar the worker gets."""

import json
from typing import Any

import msgspec
import pytest
from support.running_front import RunningFront

from mstar.communication.messages import Grammar

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def schema_of(schema: Any, **wrapped: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **wrapped}}


def refused(front: RunningFront, **fields: Any) -> dict[str, Any]:
    answer = front.chat(**fields)
    assert answer.status_code == 400, f"{fields}: {answer.status_code} {answer.text[:300]}"
    return answer.json()["error"]


def grammar(front: RunningFront, **fields: Any) -> Grammar | None:
    """What the worker was told of a request that must work."""
    answer = front.chat(max_tokens=1, **fields)
    assert answer.status_code == 200, f"{fields}: {answer.text[:300]}"
    return front.openings()[-1].sampling.grammar


NO_FORMATS = [
    (False, "response_format"),
    ("json_object", "response_format"),
    ([], "response_format"),
    ({}, "response_format.type"),
    ({"type": None}, "response_format.type"),
    ({"type": 3}, "response_format.type"),
    ({"type": "nonsense"}, "response_format.type"),
    ({"type": "json_object", "colour": 1}, "response_format.colour"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": None}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
    (schema_of(None), "response_format.json_schema.schema"),
    (schema_of([]), "response_format.json_schema.schema"),
]


@pytest.mark.parametrize(("value", "param"), NO_FORMATS)
def test_what_is_no_response_format_is_a_400_that_names_it(front: RunningFront, value: Any, param: str):
    """C1."""
    assert refused(front, response_format=value)["param"] == param


def test_legal_response_formats_reach_the_worker(front: RunningFront):
    """C1, the legal neighbours."""
    for free in ({}, {"response_format": None}, {"response_format": {"type": "text"}}):
        assert grammar(front, **free) is None
    anything = grammar(front, response_format={"type": "json_object"})
    city = grammar(front, response_format=schema_of(CITY, strict=True, description="where"))
    assert anything is not None and city is not None and anything.format != city.format
    assert anything.field == city.field == "response_format"
    assert json.loads(city.format)["json_schema"]["required"] == ["city"]
    assert grammar(front, guided_json=json.dumps(CITY)) == msgspec.structs.replace(city, field="guided_json")


@pytest.mark.parametrize(
    ("schema", "at_fault"),
    [
        ({"type": "nonsense"}, "type"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "objekt"}}}}, "properties.a.items"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "string", "pattern": '^"$'}, "pattern"),
        (False, "false allows nothing"),
    ],
)
def test_what_a_schema_says_is_enforced_or_refused(front: RunningFront, schema: Any, at_fault: str):
    """C3, C4."""
    if isinstance(schema, dict):
        error = refused(front, response_format=schema_of(schema))
        assert error["param"] == "response_format" and at_fault in error["message"]
    for value in (schema, json.dumps(schema)):
        error = refused(front, guided_json=value)
        assert error["param"] == "guided_json" and at_fault in error["message"]
    assert at_fault in refused(front, structured_outputs={"json": schema})["message"]


def test_only_one_field_says_what_the_text_is(front: RunningFront):
    assert refused(front, guided_regex="a", guided_choice=["a"])["param"] == "guided_choice"
    assert refused(front, guided_regex="a", response_format={"type": "json_object"})["param"] == "response_format"
    assert refused(front, structured_outputs={"json": {}, "regex": "a"})["param"] == "structured_outputs.regex"
    alone = grammar(front, guided_regex="a", response_format={"type": "text"}, guided_json=None)
    assert alone is not None
    assert (alone.field, json.loads(alone.format)) == ("guided_regex", {"type": "regex", "pattern": "a"})
    assert grammar(front, structured_outputs={"json_object": False}) is None
