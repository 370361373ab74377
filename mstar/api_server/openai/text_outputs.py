"""Runs one request for text: from the conductor's events to what may be shown of each choice.

Front loop only; one task per request, and a second one that waits for the client to leave, which aborts the request.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from starlette.types import Receive, Send
from tokenizers import Tokenizer

from mstar.api_server.answer.deltas import AnswerDelta, ContentDelta
from mstar.api_server.answer.reader import AnswerReader
from mstar.api_server.client_watch import client_left
from mstar.api_server.connection import BodyWriter
from mstar.api_server.front_state import new_id
from mstar.api_server.openai.adapter import TextRequest
from mstar.api_server.openai.logprobs import NOT_ASKED, TokenNote
from mstar.api_server.openai.usage import Usage
from mstar.api_server.text import ChoiceText, Piece
from mstar.conductor.events import (
    Event,
    Failure,
    FinishedEvent,
    PreparedEvent,
    RefusedError,
    RequestStream,
    TensorEvent,
    TokenEvent,
)
from mstar.conductor.handle import ConductorHandle


class Output(NamedTuple):
    """What may be shown now of a choice, and the notes of the tokens that it completes. `reason`: it is the last of the
    choice, which finished for that reason."""

    choice: int
    deltas: Sequence[AnswerDelta]
    notes: Sequence[TokenNote]
    reason: str | None = None


class TextOutputs(ABC):
    """One request that has been taken on; `close` it whatever happens, which aborts it where it has not ended."""

    keeps_notes = False
    """Every token has a note, logprobs or not."""

    def __init__(self, handle: ConductorHandle, request: TextRequest, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None where tokens are given out as they are. Raises `RefusedError` if the request is not taken
        on."""
        self.request = request
        self.usage = Usage(request.generate.num_choices, counts_reasoning=request.tells_reasoning)
        self.stream: RequestStream = handle.submit(request.generate)
        self.num_results = request.generate.num_results
        self._handle = handle
        self.tokenizer = tokenizer
        self.choices: list[ChoiceText[TokenNote]] = [self._new_choice(()) for _ in range(self.num_results)]
        self.readers: list[AnswerReader] = []
        """One for each choice of an answer that is taken apart."""
        self.writer: BodyWriter | None = None
        """Of the response's body, while it is streamed by a server that has one."""
        self._leaving: asyncio.Task[None] | None = None

    @abstractmethod
    async def whole(self) -> bytes:
        """The whole response, as JSON.

        Raises:
            RefusedError: the request failed.
        """

    @abstractmethod
    async def write(self, events: Sequence[Event], send: Send) -> None:
        """Sends the bodies of a stream that begins with `events`; what a pass of the conductor brought is one body."""

    def watch_client(self, receive: Receive) -> None:
        """From now on the request ends when the client's connection does."""
        self._leaving = asyncio.create_task(self._abort_when_left(receive))

    def close(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        self._handle.abort(self.stream)

    async def first_events(self) -> list[Event]:
        """Waits until there is something to stream.

        Raises:
            RefusedError: the request failed before anything was sent.
        """
        events: list[Event] = []
        while not any(isinstance(event, TokenEvent | TensorEvent | FinishedEvent) for event in events):
            events += await self.stream.take()
            for event in events:
                if isinstance(event, Failure):
                    raise RefusedError(event)
        return events

    def output_of(self, event: Event) -> Output | None:
        """What an event that is no failure makes known; None: nothing that is shown."""
        match event:
            case TokenEvent():
                return self._push(event)
            case FinishedEvent():
                return self._finish(event)
            case PreparedEvent():
                self._prepared(event)
                return None
            case _:
                return None

    def _new_choice(self, prompt_tail: Sequence[int]) -> ChoiceText[TokenNote]:
        return ChoiceText(
            self.tokenizer,
            end_tokens=self.request.end_tokens,
            stops=self.request.stops,
            prompt_tail=prompt_tail,
        )

    def _prepared(self, event: PreparedEvent) -> None:
        """A completion continues its prompt's text; a chat answer begins a text of its own."""
        self.request = replace(self.request, generate=self.stream.request)  # its words need not be kept any longer
        request = self.request.generate
        first = event.prompt * request.num_choices
        if request.prompts[event.prompt].kind == "completion":
            for index in range(first, first + request.num_choices):
                self.choices[index] = self._new_choice(event.tail)
        elif self.request.answer is not None:
            self.readers = [
                AnswerReader(
                    self.request.answer, opens_reasoning=event.opens_reasoning, new_id=partial(new_id, "call_")
                )
                for _ in range(request.num_choices)
            ]

    def _push(self, event: TokenEvent) -> Output:
        choice = self.choices[event.choice]
        was_stopped = choice.is_stopped
        note = None
        if event.logprobs is not None or self.readers or self.keeps_notes:
            note = TokenNote(event.token, event.logprobs or NOT_ASKED, choice.num_told)
        piece = choice.push_noted(event.token, note)
        if choice.is_stopped and not was_stopped:
            self._handle.stop(self.stream, event.choice)
        return self._read(event.choice, piece)

    def _finish(self, event: FinishedEvent) -> Output:
        choice = self.choices[event.choice]
        output = self._read(event.choice, choice.finish())
        reason, num_reasoning = event.reason, 0
        if choice.is_stopped:
            reason = "stop"
        if self.readers:
            reader = self.readers[event.choice]
            rest = reader.finish(is_whole=reason == "stop" and not choice.is_stopped)
            output = output._replace(deltas=(*output.deltas, *rest))
            reason, num_reasoning = reader.reason(reason), reader.num_reasoning_tokens
        self.usage.add(event, choice.num_tokens, num_reasoning)
        return output._replace(reason=reason)

    def _read(self, choice: int, piece: Piece[TokenNote]) -> Output:
        text, notes = piece
        if not self.readers:
            return Output(choice, (ContentDelta(text),) if text else (), notes)
        reader = self.readers[choice]
        deltas = reader.feed(text) if text else ()
        reader.num_reasoning_tokens += sum(reader.has_reasoning_at(note.start) for note in notes)
        return Output(choice, deltas, notes)

    async def _abort_when_left(self, receive: Receive) -> None:
        await client_left(receive)
        self._handle.abort(self.stream)
