"""Workload kinds by name: which request goes where, and how its answer is read.

A kind that joins implements `Workload` and is named in `mstar.bench.command`; latencies are reported by kind.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mstar.bench.connection import Response
from mstar.bench.openai_events import StreamReader
from mstar.bench.prompts import MakePrompt
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


class Workload(Protocol):
    """Requests `0, 1, ...` of one kind."""

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> str: ...
    def body(self, index: int) -> bytes: ...
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
    kind: str = "text_to_text"

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self, index: int) -> bytes:
        prompt = self.prompts(index)
        body: dict[str, Any] = {"model": self.model, "stream": True, "temperature": self.temperature}
        body["max_tokens"] = prompt.max_tokens or self.max_tokens
        if self.api is Api.CHAT:
            body["messages"] = prompt.turns()
        else:
            body["prompt"] = prompt.text()
        if self.temperature > 0:
            body["seed"] = self.seed + index
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode({**body, **self.extra})

    def reader(self, record: RequestRecord) -> StreamReader:
        return StreamReader(record)
