"""Server-sent events over ASGI: headers, and bodies written by hand. Front loop only."""

from __future__ import annotations

from mstar.api_server.errors import error_body
from mstar.conductor.events import Failure

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"


def error_event(failure: Failure) -> bytes:
    """The last event of a stream that has failed; `[DONE]` does not follow."""
    return b"event: error\ndata: " + error_body(failure) + b"\n\n"
