"""The OpenAPI document: request schemas that routes parse themselves, and OpenAI's error shape. Pure.

Routes read their bodies with `json_body`, which is stricter than the framework and answers 400; `describe` tells the
document what such a route takes, and `build_openapi` adds the schemas.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

EVENTS = "text/event-stream"
REF = "#/components/schemas/{model}"
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERROR_STATUSES = (400, 401, 403, 404, 413, 415, 429, 499, 500, 503, 504)
_described: list[type[BaseModel]] = []
_answers: list[type[BaseModel]] = []


def describe(
    schema: type[BaseModel] | None,
    summary: str,
    *,
    answer: type[BaseModel] | None = None,
    answered_as: int | None = None,
    text: str | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a route: its body, answers and errors. `answer`: the schema of its JSON (None: an object).
    `answered_as`: another status that has the same. `text`: a media type that it answers with too."""
    whole: dict[str, Any] = {"type": "object"}
    if answer is not None:
        _answers.append(answer)
        whole = {"$ref": REF.format(model=answer.__name__)}
    content: dict[str, Any] = {"application/json": {"schema": whole}}
    if text is not None:
        content[text] = {}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "The answer", "content": content}}
    for status in ERROR_STATUSES:
        error = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
        responses[status] = {"description": "An error", "content": error}
    if answered_as is not None:
        responses[answered_as] = responses[200]
    options: dict[str, Any] = {"summary": summary, "responses": responses, "response_model": None}
    if schema is not None:
        _described.append(schema)
        body = {"application/json": {"schema": {"$ref": REF.format(model=schema.__name__)}}}
        options["openapi_extra"] = {"requestBody": {"required": True, "content": body}}
    return options


def build_openapi(app: FastAPI, served_names: tuple[str, ...]) -> dict[str, Any]:
    """The document; `model` is one of the served names in it."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in dict.fromkeys((*_described, *_answers))], ref_template=REF
    )
    schemas = {"Error": ERROR_SCHEMA, **definitions.get("$defs", {})}
    for schema in _described:
        declared = schemas[schema.__name__]
        if "model" in declared.get("properties", {}):
            may_be_null = "model" not in declared.get("required", ())
            names = [*served_names, None] if may_be_null else list(served_names)
            declared["properties"]["model"] = {"title": "Model", "enum": names}
    document.setdefault("components", {})["schemas"] = schemas
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return document
