"""What every request passes first: its id, the API key, the size of its body; and last, its line in the log.

ASGI, front loop only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.api_server.errors import error_response
from mstar.conductor.events import Failure, RefusedError
from mstar.config.api_keys import AcceptedKeys
from mstar.process_log import REQUEST

logger = logging.getLogger(__name__)
OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready", "/version", "/metrics"})
"""Answered without a key: probes and scrapers have none."""
ADMIN_PATHS = "/debug/"
"""Where they begin."""
OPEN_FOLDER = "/page/"
"""The built-in page's own files; what it shows needs a key."""
LIVE_VIEW = "/debug/live"
"""Asked for by the page all the time that it is open."""
LAST = {"connection": "close"}
"""Where the client waits with the body until it hears that it may send it: nobody could tell whether it still comes."""
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Entrance:
    """Wraps the application. A request id is taken from `x-request-id` if it is printable ASCII of up to 128
    characters, else made up, and always returned. In the scope's state it leaves `request_id` and `send`, the server's
    own, for bodies that need nothing of the layers between. HEAD is answered as GET: the server leaves out the body, by
    the method in its own scope."""

    def __init__(self, app: ASGIApp, *, api_keys: AcceptedKeys, max_body_bytes: int, responses: Counter[int]) -> None:
        """`responses`: counts each by its status."""
        self._app = app
        self._keys = _digests(api_keys.keys)
        self._admin_keys = _digests(api_keys.admin_keys)
        self._max_body_bytes = max_body_bytes
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else b"req-" + secrets.token_hex(12).encode()
        scope.setdefault("state", {}).update(request_id=request_id.decode("ascii"), send=send)

        began, status = time.monotonic(), 500
        noted: dict[str, Any] = {"request_id": request_id.decode("ascii")}
        REQUEST.set(noted)  # of this request's task alone, and of the tasks that it starts

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if failure := self._refusal(scope, headers):
                noted["error"] = failure.message
                await error_response(failure, LAST if b"expect" in headers else None)(scope, receive, send_with_id)
                return
            inner = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}
            await self._app(inner, self._limited(receive), send_with_id)
        finally:
            self._responses[status] += 1
            _log(scope, status, time.monotonic() - began, noted)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Failure | None:
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or scope["method"] == "OPTIONS"
        if self._keys and not is_open:
            digest = _digest_of(headers.get(b"authorization", b""))
            if not _is_among(digest, self._keys):
                message = "Missing or wrong API key; send it as 'Authorization: Bearer KEY'."
                return Failure(401, "invalid_api_key", message)
            if self._admin_keys and path.startswith(ADMIN_PATHS) and not _is_among(digest, self._admin_keys):
                return Failure(403, "no_admin_key", f"{path} shows what others do and needs an admin's key.")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_body_bytes):
            return self._too_large()
        return None

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise RefusedError(self._too_large())
            return message

        return receive_limited

    def _too_large(self) -> Failure:
        return Failure(413, "body_too_large", f"The body is larger than {self._max_body_bytes} bytes.")


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _digest_of(authorization: bytes) -> bytes:
    """Of the key in a header; empty where the scheme is another."""
    scheme, _, key = authorization.partition(b" ")
    digest = hashlib.sha256(key.strip()).digest()
    return digest if scheme.lower() == b"bearer" else b""


def _is_among(digest: bytes, known: Sequence[bytes]) -> bool:
    """Takes the same time whichever key is right, and wherever a wrong one differs."""
    is_known = False
    for one in known:
        is_known |= hmac.compare_digest(one, digest)
    return is_known


def _log(scope: Scope, status: int, took_s: float, noted: dict[str, Any]) -> None:
    """One line for each request; probes, scrapers and the page come too often to be of interest. A stream's status is
    that of its beginning, `outcome` says how it ended; `error` why it was refused."""
    path = scope["path"]
    is_routine = path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or (path == LIVE_VIEW and status == HTTPStatus.OK)
    level = logging.DEBUG if is_routine else logging.INFO
    if "error" in noted and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        level = logging.WARNING
    if not logger.isEnabledFor(level):
        return
    fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(took_s, 4), **noted}
    words = f", {noted['prompt_tokens']} + {noted['outputs']} tokens, {noted['outcome']}" if "outcome" in noted else ""
    words += f": {noted['error']}" if "error" in noted else ""
    logger.log(
        level,
        "%s %s %s: %d in %.3f s%s",
        noted["request_id"],
        scope["method"],
        path,
        status,
        took_s,
        words,
        extra={"fields": fields},
    )
