"""Workload kinds by name: which request goes where, and how its answer is read.

A kind that joins implements `Workload` and is named in `mstar.bench.composition`; latencies are reported by kind.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from mstar.bench.connection import Response
from mstar.bench.images import ImageChoice
from mstar.bench.openai_events import StreamReader
from mstar.bench.prompts import MakePrompt, Prompt
from mstar.bench.records import RequestRecord


class Api(enum.StrEnum):
    """Which endpoint of the OpenAI API."""

    CHAT = "chat"
    COMPLETIONS = "completions"


PATHS: Mapping[Api, str] = {Api.CHAT: "/v1/chat/completions", Api.COMPLETIONS: "/v1/completions"}


class AnswerReader(Protocol):
    """Fills one record: called with each event's payload and time, closed with the response."""

    def __call__(self, payload: bytes, at_s: float, /) -> None: ...
    def close(self, response: Response, /) -> None: ...


class WorkloadRequest(NamedTuple):
    """One request, ready to send. `variant` divides a kind whose requests should not all be alike to the server; ""
    where there is one only."""

    kind: str
    path: str
    body: bytes
    variant: str = ""


class Workload(Protocol):
    """Requests `0, 1, ...`; -1 is a probe."""

    def request(self, index: int) -> WorkloadRequest: ...
    def reader(self, record: RequestRecord) -> AnswerReader: ...


@dataclass(frozen=True, slots=True)
class TextToText:
    """Streamed text from text. `extra` fields are merged into each body last."""

    model: str
    api: Api
    prompts: MakePrompt
    max_tokens: int
    ignore_eos: bool
    include_usage: bool
    temperature: float
    seed: int
    extra: Mapping[str, Any]

    def request(self, index: int) -> WorkloadRequest:
        prompt = self.prompts(index)
        if self.api is Api.CHAT:
            question = {"messages": [{"role": turn.role, "content": turn.content} for turn in prompt.turns()]}
        else:
            question = {"prompt": prompt.text()}
        return WorkloadRequest("text_to_text", PATHS[self.api], self.encode(index, prompt, question))

    def encode(self, index: int, prompt: Prompt, question: Mapping[str, Any]) -> bytes:
        """The body of a request that asks `question`."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "temperature": self.temperature}
        body["max_tokens"] = prompt.max_tokens or self.max_tokens
        body.update(question)
        if self.temperature > 0:
            body["seed"] = self.seed + index
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode({**body, **self.extra})

    def reader(self, record: RequestRecord) -> StreamReader:
        return StreamReader(record)


@dataclass(frozen=True, slots=True)
class ImageToText:
    """Streamed text from images and text: those of `text`, in chats, with images at the beginning of the last turn.
    Requests whose images were seen before are a variant: of theirs, a server may have features and a prefix cached."""

    text: TextToText
    images: ImageChoice

    def request(self, index: int) -> WorkloadRequest:
        prompt = self.text.prompts(index)
        chosen = self.images.images(index)
        messages: list[dict[str, Any]] = [{"role": turn.role, "content": turn.content} for turn in prompt.turns()]
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in chosen.urls]
        messages[-1]["content"] = [*parts, {"type": "text", "text": messages[-1]["content"]}]
        body = self.text.encode(index, prompt, {"messages": messages})
        return WorkloadRequest("image_to_text", PATHS[Api.CHAT], body, "seen" if chosen.seen else "new")

    def reader(self, record: RequestRecord) -> StreamReader:
        return self.text.reader(record)


@dataclass(frozen=True, slots=True)
class Mix:
    """Both at once: a share `images` of the requests is `with_images`, evenly spread over the others. Each kind's own
    requests count from 0."""

    plain: Workload
    with_images: Workload
    images: float

    def request(self, index: int) -> WorkloadRequest:
        before = self.num_with_images(index)
        if self.num_with_images(index + 1) > before:
            return self.with_images.request(before)
        return self.plain.request(index - before)

    def num_with_images(self, num_requests: int) -> int:
        """Among the first so many."""
        return int(num_requests * self.images + 0.5)

    def reader(self, record: RequestRecord) -> AnswerReader:
        return self.plain.reader(record)
