"""The request fields of `docs/serving.rst` are the ones that the schemas accept, each on the right route."""

import re

from pydantic.fields import FieldInfo
from support.repository import ROOT

from mstar.api_server.openai.chat_schema import ChatRequest
from mstar.api_server.openai.completion_schema import CompletionRequest

SECTION = (ROOT / "docs" / "serving.rst").read_text().split("Request fields\n---")[1].split("Answers\n---")[0]
TABLE, NEUTRAL = SECTION.split("*Accepted,")


def _accepts_something(field: FieldInfo) -> bool:
    return field.annotation is not type(None)


def _supported(schema: type) -> set[str]:
    return {name for name, field in schema.model_fields.items() if _accepts_something(field)}


def _table(*where: str) -> set[str]:
    return {name for name, place in re.findall(r"\* - ``(\w+)``\n {5}- (\w+)\n", TABLE) if place in where}


def _neutral() -> set[str]:
    known = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    return set(re.findall(r"``(\w+)[`:]", NEUTRAL)) & known


def test_every_accepted_field_is_documented():
    assert _table("both", "chat", "text") | _neutral() == _supported(ChatRequest) | _supported(CompletionRequest)
    assert _table("both", "chat", "text") & _neutral() == set()


def test_fields_are_documented_for_the_routes_that_take_them():
    assert _table("both") <= _supported(ChatRequest) & _supported(CompletionRequest)
    assert _table("chat") <= _supported(ChatRequest) - _supported(CompletionRequest)
    assert _table("text") <= _supported(CompletionRequest) - _supported(ChatRequest)


def test_documented_names_are_no_refused_ones():
    assert "guided_json" in CompletionRequest.model_fields
    assert "guided_json" not in _supported(CompletionRequest)
