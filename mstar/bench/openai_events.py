"""Reads the events of a streamed OpenAI answer, chat or text, into a request's record. Called for every event."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar.bench.connection import OK, Response
from mstar.bench.records import RequestRecord

END = b"[DONE]"
NO_OUTPUT = "the stream carried no output"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamReader:
    """The sink of one request."""

    __slots__ = ("_ended", "_record")

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._ended = False

    def __call__(self, payload: bytes, at_s: float) -> None:
        record = self._record
        if payload == END:
            self._ended = True
            record.end_s = at_s
            return
        try:
            event = _decode(payload)
        except msgspec.DecodeError as error:
            record.error = f"unreadable event: {error}"
            return
        if event.error is not None:
            record.error = f"error event: {error_text(event.error)}"
            return
        for choice in event.choices:
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
            if _carries_output(choice):
                record.chunk_s.append(at_s)
                break
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                record.cached_tokens = event.usage.prompt_tokens_details.cached_tokens

    def close(self, response: Response) -> None:
        """The response is complete: say what it lacked."""
        record = self._record
        if record.error is not None:
            return
        if response.status != OK:
            record.error = f"HTTP {response.status}: {body_text(response.body)}"
        elif not self._ended:
            record.error = "the stream ended without [DONE]"
        elif not record.chunk_s:
            record.error = NO_OUTPUT


def _carries_output(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta
    return delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def body_text(body: bytes) -> str:
    """The message of an error body, whatever its shape."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace").strip()
    if isinstance(content, dict):
        return error_text(content.get("error", content))
    return str(content)[:200]


def error_text(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:200]
