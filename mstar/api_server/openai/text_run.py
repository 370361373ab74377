"""Runs one request for text: from the conductor's events to a whole response, or to a stream of chunks.

Front loop only; one task per request, and a second one that waits for the client to leave, which aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from mstar.api_server.client_watch import client_left
from mstar.api_server.connection import BODY_WRITER, BodyWriter
from mstar.api_server.openai.adapter import TextRequest
from mstar.api_server.openai.logprobs import TokenNote
from mstar.api_server.openai.shapes import ResponseShape, encode_json
from mstar.api_server.openai.usage import Usage
from mstar.api_server.sse import DONE, SSE_HEADERS, error_event
from mstar.api_server.text import ChoiceText, Piece
from mstar.conductor.events import Event, Failure, FinishedEvent, PreparedEvent, RefusedError, RequestStream, TokenEvent
from mstar.conductor.handle import ConductorHandle


class TextRun:
    """One request that has been taken on. Use it as an async context: leaving it early aborts the request."""

    def __init__(
        self, handle: ConductorHandle, request: TextRequest, shape: ResponseShape, tokenizer: Tokenizer
    ) -> None:
        """Raises `RefusedError` if the request is not taken on."""
        self.shape = shape
        self.request = request
        self.usage = Usage(request.generate.num_choices)
        self.stream: RequestStream = handle.submit(request.generate)
        self._handle = handle
        self._tokenizer = tokenizer
        self._num_results = request.generate.num_results
        self._choices: list[ChoiceText[TokenNote]] = [self._new_choice(()) for _ in range(self._num_results)]
        self._offsets = [0] * self._num_results
        self._leaving: asyncio.Task[None] | None = None

    def watch_client(self, receive: Receive) -> None:
        """From now on the request ends when the client's connection does."""
        self._leaving = asyncio.create_task(self._abort_when_left(receive))

    def close(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        self._handle.abort(self.stream)

    async def whole(self) -> bytes:
        """The whole response.

        Raises:
            RefusedError: the request failed.
        """
        texts: list[list[str]] = [[] for _ in range(self._num_results)]
        notes: list[list[TokenNote]] = [[] for _ in range(self._num_results)]
        reasons = [""] * self._num_results
        while events := await self.stream.take():
            for event in events:
                match event:
                    case TokenEvent(choice=index):
                        piece = self._push(event)
                    case FinishedEvent(choice=index):
                        piece, reasons[index] = self._finish(event)
                    case PreparedEvent():
                        self._prepared(event)
                        continue
                    case Failure():
                        raise RefusedError(event)
                    case _:
                        continue
                texts[index].append(piece.text)
                notes[index].extend(piece.notes)
        choices = [
            self.shape.choice(index, "".join(texts[index]), notes[index], reasons[index])
            for index in range(self._num_results)
        ]
        return self.shape.whole(choices, self.usage.as_json())

    async def first_events(self) -> list[Event]:
        """Waits until there is something to stream.

        Raises:
            RefusedError: the request failed before anything was sent.
        """
        events: list[Event] = []
        while not any(isinstance(event, TokenEvent | FinishedEvent) for event in events):
            events += await self.stream.take()
            for event in events:
                if isinstance(event, Failure):
                    raise RefusedError(event)
        return events

    async def write(self, events: Sequence[Event], send: Send, writer: BodyWriter | None) -> None:
        """Sends the bodies of a stream that begins with `events`; what a pass of the conductor brought is one body.
        With `writer`, passes that bring only tokens are written without waking this task."""
        body = [self.shape.opening_chunk(index) for index in range(self._num_results)]
        is_plain = self.request.num_logprobs is None and self.request.stops is None
        add = self._add_plain if is_plain else self._add
        stream = self.stream
        is_open = True
        while True:
            for event in events:
                is_open = add(event, body)
            if not is_open or not (stream.num_open or stream.has_pending):
                break
            if body:
                await send({"type": "http.response.body", "body": b"".join(body), "more_body": True})
                body.clear()
            if not stream.has_pending:
                stream.sink = partial(self._write_tokens, writer) if writer is not None and is_plain else None
                await stream.more()
                stream.sink = None
            events = stream.take_now()
        if is_open:
            if self.request.includes_usage:
                body.append(self.shape.usage_chunk(self.usage.as_json()))
            body.append(DONE)
        await send({"type": "http.response.body", "body": b"".join(body), "more_body": False})

    def _write_tokens(self, writer: BodyWriter) -> bool:
        """What has come is tokens and can be written: writes it. Called by the conductor, once per pass."""
        if not (writer.can_write and self.stream.has_only_tokens()):
            return False
        body: list[bytes] = []
        for event in self.stream.take_now():
            self._add_plain(event, body)
        if body:
            writer.write(b"".join(body))
        return True

    def _add_plain(self, event: Event, body: list[bytes]) -> bool:
        """As `_add`, for a request without stop strings and logprobs; a token costs the least here."""
        if type(event) is not TokenEvent:
            return self._add(event, body)
        text = self._choices[event.choice].push(event.token)
        if text:
            before, after = self.shape.parts[event.choice]
            body += (before, encode_json(text), after)
        return True

    def _add(self, event: Event, body: list[bytes]) -> bool:
        """Puts the chunks of one event behind `body`. False: the request has failed, nothing may follow."""
        match event:
            case TokenEvent():
                self._add_delta(event.choice, self._push(event), body)
            case FinishedEvent():
                piece, reason = self._finish(event)
                self._add_delta(event.choice, piece, body)
                body.append(self.shape.finish_chunk(event.choice, reason))
            case PreparedEvent():
                self._prepared(event)
            case Failure():
                body.append(error_event(event))
                return False
            case _:
                pass
        return True

    def _add_delta(self, choice: int, piece: Piece[TokenNote], body: list[bytes]) -> None:
        if piece.text or piece.notes:
            body.append(self.shape.delta_chunk(choice, piece.text, piece.notes, self._offsets[choice]))
            self._offsets[choice] += len(piece.text)

    def _new_choice(self, prompt_tail: Sequence[int]) -> ChoiceText[TokenNote]:
        return ChoiceText(
            self._tokenizer,
            end_tokens=self.request.end_tokens,
            stops=self.request.stops,
            prompt_tail=prompt_tail,
        )

    def _prepared(self, event: PreparedEvent) -> None:
        """A completion continues its prompt's text; a chat answer begins a text of its own."""
        request = self.request.generate
        if request.prompts[event.prompt].kind == "completion":
            first = event.prompt * request.num_choices
            for index in range(first, first + request.num_choices):
                self._choices[index] = self._new_choice(event.tail)

    def _push(self, event: TokenEvent) -> Piece[TokenNote]:
        choice = self._choices[event.choice]
        was_stopped = choice.is_stopped
        note = None if event.logprobs is None else TokenNote(event.token, event.logprobs)
        piece = choice.push_noted(event.token, note)
        if choice.is_stopped and not was_stopped:
            self._handle.stop(self.stream, event.choice)
        return piece

    def _finish(self, event: FinishedEvent) -> tuple[Piece[TokenNote], str]:
        choice = self._choices[event.choice]
        piece = choice.finish()
        self.usage.add(event, choice.num_tokens)
        return piece, "stop" if choice.is_stopped else event.reason

    async def _abort_when_left(self, receive: Receive) -> None:
        await client_left(receive)
        self._handle.abort(self.stream)


class TextStreamResponse(Response):
    """Streams a run. `events`: what its `first_events` returned."""

    def __init__(self, run: TextRun, events: Sequence[Event]) -> None:
        super().__init__()
        self._run = run
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The headers pass the whole stack of middleware. The bodies are written by a task of their own, to the server
        directly: else each token would wake and walk every layer twice."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
            writer = scope.get("extensions", {}).get(BODY_WRITER)
            await asyncio.create_task(self._run.write(self._events, scope["state"]["send"], writer))
        finally:
            self._run.close()
