"""What a request may raise. Pure; reads OpenAI's error shape out of bodies.

`ClientError` is the base of all. An answer with an error status is a `StatusError`, of a class by its status; a stream
that fails after it has begun is a `StreamError`; no answer at all is a `NoAnswerError`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ErrorFields(msgspec.Struct, frozen=True):
    """What the server says of an error. `param`: the field at fault; `code`: a word for programs."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """`{"error": {...}}`, of an answer and of an event."""

    error: ErrorFields


class ClientError(Exception):
    """Base of everything that this package raises for a request."""


class NoAnswerError(ClientError):
    """The server cannot be reached, broke the connection off, or did not answer within the client's timeout."""


class UnreadableAnswerError(ClientError):
    """What answered is not what this client speaks with."""


class _ReportedError(ClientError):
    """An error that the server has described."""

    def __init__(self, fields: ErrorFields, request_id: str | None) -> None:
        super().__init__(fields.message)
        self.message = fields.message
        self.type = fields.type
        self.param = fields.param
        self.code = fields.code
        self.request_id = request_id


class StreamError(_ReportedError):
    """A stream failed after it had begun; what came before is all that there is."""


class StatusError(_ReportedError):
    """An answer with an error status. `retry_after_s`: when the server says to come back, if it does."""

    def __init__(self, status: int, fields: ErrorFields, request_id: str | None, retry_after_s: float | None) -> None:
        super().__init__(fields, request_id)
        self.status = status
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


class BadRequestError(StatusError):
    """400: a field, named in `param`, is missing, unknown, or has a value that cannot be honoured."""


class AuthenticationError(StatusError):
    """401: a wrong or missing API key."""


class PermissionDeniedError(StatusError):
    """403: this key may not do that."""


class NotFoundError(StatusError):
    """404: no such model, request or route."""


class TooLargeError(StatusError):
    """413: the body is larger than the server takes."""


class QueueFullError(StatusError):
    """429: too many requests wait."""


class RequestAbortedError(StatusError):
    """499: somebody ended the request by its id."""


class ServerError(StatusError):
    """5xx: the server failed."""


class UnavailableError(ServerError):
    """503: the server starts, drains, or has lost a worker."""


class DeadlineError(ServerError):
    """504: the request has not ended within its `timeout`, or the server's."""


_BY_STATUS: dict[int, type[StatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    413: TooLargeError,
    429: QueueFullError,
    499: RequestAbortedError,
    503: UnavailableError,
    504: DeadlineError,
}
_decode_error = msgspec.json.Decoder(ErrorBody).decode


def status_error(status: int, headers: Mapping[str, str], body: bytes) -> StatusError:
    """The error of an answer; `headers` by lower-case name. A body that is no error of ours is named by its status."""
    try:
        fields = _decode_error(body).error
    except msgspec.DecodeError:
        fields = ErrorFields(f"the server answered with status {status}")
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else StatusError)
    return kind(status, fields, headers.get("x-request-id"), _seconds(headers.get("retry-after", "")))


def stream_error(data: bytes, request_id: str | None) -> ClientError:
    """The error that an `error` event reports."""
    try:
        return StreamError(_decode_error(data).error, request_id)
    except msgspec.DecodeError:
        return UnreadableAnswerError("the stream ended with an error that cannot be read")


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() else None
