"""The routes: what each is sent and how its answer is read. Pure, and all that the two clients have in common.

Fields of a request are handed on as they are: the server refuses by name what it does not know.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from mstar.client.answers import (
    Aborted,
    ChatCompletion,
    Completion,
    DetokenizedText,
    ModelEntry,
    ModelList,
    Status,
    Tokens,
)
from mstar.client.embeddings import Embeddings, EncodedEmbeddings
from mstar.client.errors import UnreadableAnswerError
from mstar.client.events import Event, chat_events, completion_events, generate_events
from mstar.client.generation import Generation

T = TypeVar("T")
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A conversation, or the text of a user's only message."""
SinglePrompt: TypeAlias = str | Sequence[int]
Prompt: TypeAlias = SinglePrompt | Sequence[str] | Sequence[Sequence[int]]
MODEL = "model"
_WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `decode` reads the whole answer, or of a stream the data of one event; it raises
    `UnreadableAnswerError`. `needs_model`: the field `model` has to be there."""

    method: str
    path: str
    decode: Callable[[bytes], T]
    fields: Mapping[str, Any] | None = None
    needs_model: bool = False

    @property
    def lacks_model(self) -> bool:
        return self.needs_model and (self.fields or {}).get(MODEL) is None

    def with_model(self, name: str) -> Call[T]:
        return replace(self, fields={**(self.fields or {}), MODEL: name})

    def body(self) -> bytes | None:
        return None if self.fields is None else _encode(self.fields)


def chat(messages: Messages, fields: Mapping[str, Any]) -> Call[ChatCompletion]:
    return _generation("/v1/chat/completions", _reader(ChatCompletion), {**fields, "messages": as_messages(messages)})


def stream_chat(messages: Messages, fields: Mapping[str, Any]) -> Call[Iterator[Event]]:
    fields = {**_WITH_USAGE, **fields, "messages": as_messages(messages)}
    return _generation("/v1/chat/completions", _event_reader(chat_events), fields)


def complete(prompt: Prompt, fields: Mapping[str, Any]) -> Call[Completion]:
    return _generation("/v1/completions", _reader(Completion), {**fields, "prompt": prompt})


def stream_completion(prompt: Prompt, fields: Mapping[str, Any]) -> Call[Iterator[Event]]:
    fields = {**_WITH_USAGE, **fields, "prompt": prompt}
    return _generation("/v1/completions", _event_reader(completion_events), fields)


def generate(prompt: SinglePrompt | None, messages: Messages | None, fields: Mapping[str, Any]) -> Call[Generation]:
    return _generation("/generate", _reader(Generation), {**fields, **_prompt(prompt, messages)})


def stream_generate(
    prompt: SinglePrompt | None, messages: Messages | None, fields: Mapping[str, Any]
) -> Call[Iterator[Event]]:
    given = {**fields, **_prompt(prompt, messages), "stream": True}
    return _generation("/generate", _event_reader(generate_events), given)


def embed(inputs: Prompt, fields: Mapping[str, Any]) -> Call[Embeddings]:
    """Asks for base64, a fifth of the numbers' text."""
    read = _reader(EncodedEmbeddings)

    def decode(body: bytes) -> Embeddings:
        try:
            return read(body).decoded()
        except struct.error as error:
            raise UnreadableAnswerError(f"an embedding cannot be read: {error}") from error

    return _generation("/v1/embeddings", decode, {**fields, "input": inputs, "encoding_format": "base64"})


def tokenize(prompt: str | None, messages: Messages | None, fields: Mapping[str, Any]) -> Call[list[int]]:
    read = _reader(Tokens)
    return Call("POST", "/tokenize", lambda body: read(body).tokens, {**fields, **_prompt(prompt, messages)})


def detokenize(tokens: Sequence[int]) -> Call[str]:
    read = _reader(DetokenizedText)
    return Call("POST", "/detokenize", lambda body: read(body).prompt, {"tokens": tokens})


def models() -> Call[tuple[ModelEntry, ...]]:
    read = _reader(ModelList, "a list of models")
    return Call("GET", "/v1/models", lambda body: read(body).data)


def model(name: str) -> Call[ModelEntry]:
    return Call("GET", f"/v1/models/{quote(name)}", _reader(ModelEntry))


def health() -> Call[str]:
    read = _reader(Status)
    return Call("GET", "/health", lambda body: read(body).status)


def ready() -> Call[str]:
    read = _reader(Status)
    return Call("GET", "/ready", lambda body: read(body).status)


def abort(request_id: str) -> Call[int]:
    read = _reader(Aborted)
    return Call("DELETE", f"/v1/requests/{quote(request_id, safe='')}", lambda body: read(body).aborted)


def as_messages(messages: Messages) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _prompt(prompt: SinglePrompt | None, messages: Messages | None) -> dict[str, Any]:
    """What is given of the two; the server refuses both and none."""
    given: dict[str, Any] = {} if messages is None else {"messages": as_messages(messages)}
    return given if prompt is None else {**given, "prompt": prompt}


def _generation(path: str, decode: Callable[[bytes], T], fields: Mapping[str, Any]) -> Call[T]:
    return Call("POST", path, decode, fields, needs_model=True)


def _reader(kind: type[T], what: str = "what this route answers") -> Callable[[bytes], T]:
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> T:
        try:
            return decode(body)
        except msgspec.DecodeError as error:
            raise UnreadableAnswerError(f"the answer is not {what}: {error}") from error

    return read


def _event_reader(events_of: Callable[[bytes], Sequence[Event]]) -> Callable[[bytes], Iterator[Event]]:
    def read(data: bytes) -> Iterator[Event]:
        try:
            return iter(events_of(data))
        except msgspec.DecodeError as error:
            raise UnreadableAnswerError(f"an event cannot be read: {error}") from error

    return read
