"""Errors in OpenAI's shape, for every response that is not a success. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from mstar.conductor.events import Failure, RefusedError

MAX_SHOWN = 100
"""Characters of a client's own words that an error repeats."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "request_aborted",
}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> RefusedError:
    return RefusedError(Failure(400, code, message, param))


def error_type(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(failure: Failure) -> bytes:
    """`{"error": {message, type, param, code}}`."""
    error = {
        "message": failure.message,
        "type": error_type(failure.status),
        "param": failure.param,
        "code": failure.code,
    }
    return msgspec.json.encode({"error": error})


def error_response(failure: Failure, headers: dict[str, str] | None = None) -> Response:
    all_headers = dict(headers or {})
    if failure.retry_after_s is not None:
        all_headers["retry-after"] = str(failure.retry_after_s)
    if failure.status == 401:
        all_headers["www-authenticate"] = "Bearer"
    return Response(error_body(failure), failure.status, all_headers, media_type="application/json")


def failure_of_validation(error: ValidationError) -> Failure:
    """The most specific complaint: of the branches of a union, the one that got furthest into the value."""
    complaint = max(
        error.errors(include_url=False, include_context=False, include_input=False),
        key=lambda e: len(field_path(e["loc"])),
    )
    param = param_name(complaint["loc"])
    match complaint["type"]:
        case "extra_forbidden":
            *where, name = complaint["loc"]
            param = param_name((*where, "_")).removesuffix("_") + str(name)[:MAX_SHOWN]
            return Failure(400, "unknown_parameter", f"Unrecognized request argument supplied: {param}", param)
        case "missing":
            return Failure(400, "missing_required_parameter", f"Missing required parameter: '{param}'.", param)
        case "none_required":
            return Failure(400, "unsupported_parameter", f"This server does not support '{param}'.", param)
        case "model_type" | "model_attributes_type" | "dict_type":
            return Failure(400, "invalid_value", f"Invalid '{param}': it must be an object", param or None)
        case _:
            text = complaint["msg"].removeprefix("Value error, ")
            return Failure(400, "invalid_value", f"Invalid '{param}': {text}" if param else text, param or None)


def field_path(location: Sequence[int | str]) -> list[int | str]:
    """A location without the names of types that pydantic puts into it for the branches of a union."""
    return [part for part in location if isinstance(part, int) or (part.isidentifier() and part not in _BRANCHES)]


_BRANCHES = frozenset({"str", "int", "float", "bool", "none", "nullable"})


def param_name(location: Sequence[int | str]) -> str:
    """`messages[0].content[1].type`; an index at the end is left out, because the field is what a client can name."""
    path = field_path(location)
    while path and isinstance(path[-1], int):
        path.pop()
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name
