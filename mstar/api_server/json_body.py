"""Request bodies: read, parsed strictly, validated. Front loop only.

JSON as RFC 8259 has it: no NaN, no number beyond a double, no lone surrogate, bounded depth. Whatever is wrong is a 400
that says so.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from mstar.api_server.errors import MAX_SHOWN, bad_request, failure_of_validation
from mstar.conductor.events import ABORTED, Failure, RefusedError

Body = TypeVar("Body", bound=BaseModel)


async def read_json(request: Request, schema: type[Body]) -> Body:
    """The body as `schema`.

    Raises:
        RefusedError: 400, with the field at fault where there is one; 415 for a compressed body; 413 comes from the
            body limit.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        message = f"The body's Content-Encoding '{encoding[:MAX_SHOWN]}' is not supported; send it as it is."
        raise RefusedError(Failure(415, "unsupported_content_encoding", message))
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise bad_request(
            f"The Content-Type of the body must be application/json, not '{media_type[:MAX_SHOWN]}'.",
            code="invalid_content_type",
        )
    try:
        body = b"".join([part async for part in request.stream()])  # `body()` would keep it as long as the request
    except ClientDisconnect:
        raise RefusedError(ABORTED) from None
    return parse_json(body, schema)


def parse_json(body: bytes, schema: type[Body]) -> Body:
    """As `read_json`, for a body that is there."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"The body must be a JSON object, not {_kind(value)}.", code="invalid_json")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise RefusedError(failure_of_validation(error)) from None


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
