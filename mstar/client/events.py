"""Events of a stream, and how they come out of the chunks that the server sends. Pure."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from mstar.client.answers import ChatLogprobs, CompletionLogprobs, Usage
from mstar.client.generation import SampledLogprob


class TextEvent(msgspec.Struct, frozen=True):
    """A piece of the answer's text. `logprobs`: of the tokens that it completes, if asked for, in the shape of the
    route; `tokens`: their ids, from `/generate`."""

    text: str
    choice: int = 0
    logprobs: ChatLogprobs | CompletionLogprobs | tuple[SampledLogprob, ...] | None = None
    tokens: tuple[int, ...] = ()


class ReasoningEvent(msgspec.Struct, frozen=True):
    """A piece of what the model thinks before it answers."""

    text: str
    choice: int = 0


class ToolCallEvent(msgspec.Struct, frozen=True):
    """A call begins, with `id` and `name`; or goes on, with a piece of its `arguments`. `index` counts the choice's
    calls."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    choice: int = 0


class FinishEvent(msgspec.Struct, frozen=True):
    """A choice has ended: stop, length or tool_calls."""

    reason: str
    choice: int = 0


class UsageEvent(msgspec.Struct, frozen=True):
    """Tokens of the whole request; the last event."""

    usage: Usage


class PreparedEvent(msgspec.Struct, frozen=True, tag_field="type", tag="prepared"):
    """Of `/generate`: the prompt is ready. `id` names the request to `abort`."""

    id: str
    prompt_tokens: int


class TokenEvent(msgspec.Struct, frozen=True, tag_field="type", tag="token"):
    """Of `/generate`: a token that is no text, such as one of a codec."""

    signal: str
    token: int
    choice: int = 0


class TensorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="tensor"):
    """Of `/generate`: what a model emits that is no token; its fields are those of `Tensor`."""

    signal: str
    modality: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    choice: int = 0


Event: TypeAlias = (
    TextEvent | ReasoningEvent | ToolCallEvent | FinishEvent | UsageEvent | PreparedEvent | TokenEvent | TensorEvent
)


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[SampledLogprob, ...] | None = None


class _Finished(msgspec.Struct, tag_field="type", tag="finished"):
    finish_reason: str
    choice: int
    usage: Usage | None = None


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int
    id: str | None = None
    function: _FunctionDelta = msgspec.field(default_factory=_FunctionDelta)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] = []


class _ChatChoice(msgspec.Struct):
    index: int
    delta: _Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class _ChatChunk(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: Usage | None = None


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class _TextChunk(msgspec.Struct):
    choices: list[_TextChoice]
    usage: Usage | None = None


_decode_chat = msgspec.json.Decoder(_ChatChunk).decode
_decode_text = msgspec.json.Decoder(_TextChunk).decode
_decode_generated = msgspec.json.Decoder(_Text | _Finished | PreparedEvent | TokenEvent | TensorEvent).decode


def chat_events(data: bytes) -> list[Event]:
    """Events of one chunk of a chat. Raises `msgspec.DecodeError` for what is none."""
    events: list[Event] = []
    chunk = _decode_chat(data)
    for choice in chunk.choices:
        delta, index = choice.delta, choice.index
        if delta.reasoning_content:
            events.append(ReasoningEvent(delta.reasoning_content, index))
        if delta.content or (choice.logprobs is not None and choice.logprobs.content):
            events.append(TextEvent(delta.content or "", index, choice.logprobs))
        for call in delta.tool_calls:
            function = call.function
            events.append(ToolCallEvent(call.index, function.arguments or "", call.id, function.name, index))
        if choice.finish_reason is not None:
            events.append(FinishEvent(choice.finish_reason, index))
    if chunk.usage is not None:
        events.append(UsageEvent(chunk.usage))
    return events


def completion_events(data: bytes) -> list[Event]:
    """Events of one chunk of a text completion. Raises `msgspec.DecodeError` for what is none."""
    events: list[Event] = []
    chunk = _decode_text(data)
    for choice in chunk.choices:
        if choice.text or choice.logprobs is not None:
            events.append(TextEvent(choice.text, choice.index, choice.logprobs))
        if choice.finish_reason is not None:
            events.append(FinishEvent(choice.finish_reason, choice.index))
    if chunk.usage is not None:
        events.append(UsageEvent(chunk.usage))
    return events


def generate_events(data: bytes) -> list[Event]:
    """Events of one event of `/generate`. Raises `msgspec.DecodeError` for what is none."""
    match _decode_generated(data):
        case _Text(text=text, choice=choice, logprobs=logprobs, tokens=tokens):
            return [TextEvent(text, choice, logprobs, tokens)]
        case _Finished(finish_reason=reason, choice=choice, usage=usage):
            finish = FinishEvent(reason, choice)
            return [finish] if usage is None else [finish, UsageEvent(usage)]
        case event:
            return [event]
