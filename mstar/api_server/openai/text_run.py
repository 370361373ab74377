"""Runs one request for text: from the conductor's events to a whole response, or to a stream of chunks.

Front loop only; one task per request, and a second one that waits for the client to leave, which aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from mstar.api_server.answer.deltas import AnswerDelta, ContentDelta
from mstar.api_server.answer.reader import AnswerReader, WholeAnswer
from mstar.api_server.client_watch import client_left
from mstar.api_server.connection import BODY_WRITER, BodyWriter
from mstar.api_server.front_state import new_id
from mstar.api_server.openai.adapter import TextRequest
from mstar.api_server.openai.logprobs import NOT_ASKED, TokenNote
from mstar.api_server.openai.shapes import ResponseShape, encode_json
from mstar.api_server.openai.usage import Usage
from mstar.api_server.sse import DONE, SSE_HEADERS, error_event
from mstar.api_server.text import ChoiceText, Piece
from mstar.conductor.events import Event, Failure, FinishedEvent, PreparedEvent, RefusedError, RequestStream, TokenEvent
from mstar.conductor.handle import ConductorHandle


class Output(NamedTuple):
    """What may be shown now of a choice, and the notes of the tokens that it completes."""

    deltas: Sequence[AnswerDelta]
    notes: Sequence[TokenNote]


class TextRun:
    """One request that has been taken on. Use it as an async context: leaving it early aborts the request."""

    def __init__(
        self, handle: ConductorHandle, request: TextRequest, shape: ResponseShape, tokenizer: Tokenizer
    ) -> None:
        """Raises `RefusedError` if the request is not taken on."""
        self.shape = shape
        self.request = request
        self.usage = Usage(request.generate.num_choices, counts_reasoning=request.tells_reasoning)
        self.stream: RequestStream = handle.submit(request.generate)
        self._handle = handle
        self._tokenizer = tokenizer
        self._num_results = request.generate.num_results
        self._choices: list[ChoiceText[TokenNote]] = [self._new_choice(()) for _ in range(self._num_results)]
        self._readers: list[AnswerReader] = []
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
        answers = [WholeAnswer() for _ in range(self._num_results)]
        notes: list[list[TokenNote]] = [[] for _ in range(self._num_results)]
        reasons = [""] * self._num_results
        while events := await self.stream.take():
            for event in events:
                match event:
                    case TokenEvent(choice=index):
                        output = self._push(event)
                    case FinishedEvent(choice=index):
                        output, reasons[index] = self._finish(event)
                    case PreparedEvent():
                        self._prepared(event)
                        continue
                    case Failure():
                        raise RefusedError(event)
                    case _:
                        continue
                for delta in output.deltas:
                    answers[index].add(delta)
                notes[index].extend(output.notes)
        choices = [
            self.shape.choice(index, answers[index], notes[index], reasons[index]) for index in range(self._num_results)
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
        add = self._add_of_a_token() or self._add
        is_plain = add != self._add
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
                stream.sink = partial(self._write_tokens, writer, add) if writer is not None and is_plain else None
                await stream.more()
                stream.sink = None
            events = stream.take_now()
        if is_open:
            if self.request.includes_usage:
                body.append(self.shape.usage_chunk(self.usage.as_json()))
            body.append(DONE)
        await send({"type": "http.response.body", "body": b"".join(body), "more_body": False})

    def _add_of_a_token(self) -> Callable[[Event, list[bytes]], bool] | None:
        """The cheaper `_add`, where nothing has to be kept of a token until its text is shown."""
        if self.request.num_logprobs is not None or self.request.stops is not None:
            return None
        return self._add_plain if self.request.answer is None else self._add_read

    def _write_tokens(self, writer: BodyWriter, add: Callable[[Event, list[bytes]], bool]) -> bool:
        """What has come is tokens and can be written: writes it. Called by the conductor, once per pass."""
        if not (writer.can_write and self.stream.has_only_tokens()):
            return False
        body: list[bytes] = []
        for event in self.stream.take_now():
            add(event, body)
        if body:
            writer.write(b"".join(body))
        return True

    def _add_plain(self, event: Event, body: list[bytes]) -> bool:
        """As `_add`, for a request without stop strings and logprobs whose answer is not taken apart; a token costs the
        least here."""
        if type(event) is not TokenEvent:
            return self._add(event, body)
        text = self._choices[event.choice].push(event.token)
        if text:
            before, after = self.shape.parts[event.choice]
            body += (before, encode_json(text), after)
        return True

    def _add_read(self, event: Event, body: list[bytes]) -> bool:
        """As `_add_plain`, for an answer that is taken apart."""
        if type(event) is not TokenEvent:
            return self._add(event, body)
        choice = event.choice
        reader = self._readers[choice]
        was_reasoning = reader.is_reasoning
        text = self._choices[choice].push(event.token)
        if text:
            if reader.passes_as_content(text):
                before, after = self.shape.parts[choice]
                body += (before, encode_json(text), after)
            elif reader.passes_as_reasoning(text):
                before, after = self.shape.reasoning_parts[choice]
                body += (before, encode_json(text), after)
            else:
                body += [self.shape.delta_chunk(choice, delta, (), 0) for delta in reader.feed(text)]
        if (was_reasoning or reader.is_reasoning) and event.token not in self.request.end_tokens:
            reader.num_reasoning_tokens += 1
        return True

    def _add(self, event: Event, body: list[bytes]) -> bool:
        """Puts the chunks of one event behind `body`. False: the request has failed, nothing may follow."""
        match event:
            case TokenEvent():
                self._add_output(event.choice, self._push(event), body)
            case FinishedEvent():
                output, reason = self._finish(event)
                self._add_output(event.choice, output, body)
                body.append(self.shape.finish_chunk(event.choice, reason))
            case PreparedEvent():
                self._prepared(event)
            case Failure():
                body.append(error_event(event))
                return False
            case _:
                pass
        return True

    def _add_output(self, choice: int, output: Output, body: list[bytes]) -> None:
        """The last of the deltas that tokens bring together has their logprobs."""
        deltas = output.deltas
        if not deltas and output.notes and self.request.num_logprobs is not None:
            deltas = (ContentDelta(""),)
        for index, delta in enumerate(deltas, 1):
            notes = output.notes if index == len(deltas) else ()
            body.append(self.shape.delta_chunk(choice, delta, notes, self._offsets[choice]))
            self._offsets[choice] += len(delta.text) if type(delta) is ContentDelta else 0

    def _new_choice(self, prompt_tail: Sequence[int]) -> ChoiceText[TokenNote]:
        return ChoiceText(
            self._tokenizer,
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
                self._choices[index] = self._new_choice(event.tail)
        elif self.request.answer is not None:
            self._readers = [
                AnswerReader(
                    self.request.answer, opens_reasoning=event.opens_reasoning, new_id=partial(new_id, "call_")
                )
                for _ in range(request.num_choices)
            ]

    def _push(self, event: TokenEvent) -> Output:
        choice = self._choices[event.choice]
        was_stopped = choice.is_stopped
        note = None
        if event.logprobs is not None or self._readers:
            note = TokenNote(event.token, event.logprobs or NOT_ASKED, choice.num_told)
        piece = choice.push_noted(event.token, note)
        if choice.is_stopped and not was_stopped:
            self._handle.stop(self.stream, event.choice)
        return self._read(event.choice, piece)

    def _finish(self, event: FinishedEvent) -> tuple[Output, str]:
        choice = self._choices[event.choice]
        output = self._read(event.choice, choice.finish())
        reason, num_reasoning = event.reason, 0
        if choice.is_stopped:
            reason = "stop"
        if self._readers:
            reader = self._readers[event.choice]
            rest = reader.finish(is_whole=reason == "stop" and not choice.is_stopped)
            output = Output((*output.deltas, *rest), output.notes)
            reason, num_reasoning = reader.reason(reason), reader.num_reasoning_tokens
        self.usage.add(event, choice.num_tokens, num_reasoning)
        return output, reason

    def _read(self, choice: int, piece: Piece[TokenNote]) -> Output:
        text, notes = piece
        if not self._readers:
            return Output((ContentDelta(text),) if text else (), notes)
        reader = self._readers[choice]
        deltas = reader.feed(text) if text else ()
        reader.num_reasoning_tokens += sum(reader.has_reasoning_at(note.start) for note in notes)
        return Output(deltas, notes)

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
