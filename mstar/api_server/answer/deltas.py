"""Pieces of a chat answer, as they become known. Pure data, front loop only."""

from __future__ import annotations

from typing import NamedTuple


class ContentDelta(NamedTuple):
    """More of the answer's text. Never empty."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of what the model thinks before it answers. Never empty."""

    text: str


class CallDelta(NamedTuple):
    """Call number `call` begins. Its arguments follow."""

    call: int
    call_id: str
    name: str


class ArgumentsDelta(NamedTuple):
    """More of the JSON text of a call's arguments. Never empty."""

    call: int
    text: str


AnswerDelta = ContentDelta | ReasoningDelta | CallDelta | ArgumentsDelta


class ToolCall(NamedTuple):
    """A call with all that came of its arguments: a JSON object, unless the answer was cut inside it."""

    call_id: str
    name: str
    arguments: str
