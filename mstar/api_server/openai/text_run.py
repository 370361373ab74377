"""Runs one chat or text completion: from outputs to a whole response, or to a stream of chunks. Front loop only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from starlette.types import Send
from tokenizers import Tokenizer

from mstar.api_server.answer.deltas import ContentDelta
from mstar.api_server.answer.reader import WholeAnswer
from mstar.api_server.connection import BodyWriter
from mstar.api_server.openai.adapter import TextRequest
from mstar.api_server.openai.logprobs import TokenNote
from mstar.api_server.openai.shapes import ResponseShape, encode_json
from mstar.api_server.openai.text_outputs import Output, TextOutputs
from mstar.api_server.sse import DONE, error_event
from mstar.conductor.events import Event, Failure, RefusedError, TokenEvent
from mstar.conductor.handle import ConductorHandle
from mstar.conductor.request import PromptInput


class TextRun(TextOutputs):
    """One request for a chat or text completion that has been taken on."""

    def __init__(
        self, handle: ConductorHandle, request: TextRequest, shape: ResponseShape, tokenizer: Tokenizer
    ) -> None:
        """Raises `RefusedError` if the request is not taken on."""
        super().__init__(handle, request, tokenizer)
        self.shape = shape
        self._offsets = [0] * self.num_results
        prompts = request.generate.prompts if request.echoes else ()
        self._echoes = [_text_of(prompt, tokenizer) for prompt in prompts for _ in range(request.generate.num_choices)]

    async def whole(self) -> bytes:
        answers = [WholeAnswer() for _ in range(self.num_results)]
        for answer, echo in zip(answers, self._echoes, strict=False):
            answer.add(ContentDelta(echo))
        notes: list[list[TokenNote]] = [[] for _ in range(self.num_results)]
        reasons = [""] * self.num_results
        while events := await self.stream.take():
            for event in events:
                if isinstance(event, Failure):
                    raise RefusedError(event)
                if (output := self.output_of(event)) is None:
                    continue
                index = output.choice
                for delta in output.deltas:
                    answers[index].add(delta)
                notes[index].extend(output.notes)
                reasons[index] = output.reason or ""
        choices = [
            self.shape.choice(index, answers[index], notes[index], reasons[index]) for index in range(self.num_results)
        ]
        return self.shape.whole(choices, self.usage.as_json())

    async def write(self, events: Sequence[Event], send: Send) -> None:
        """With a `writer`, passes that bring only tokens are written without waking this task."""
        writer = self.writer
        body = [self.shape.opening_chunk(index) for index in range(self.num_results)]
        body += [self.shape.delta_chunk(index, ContentDelta(echo), (), 0) for index, echo in enumerate(self._echoes)]
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
        text = self.choices[event.choice].push(event.token)
        if text:
            before, after = self.shape.parts[event.choice]
            body += (before, encode_json(text), after)
        return True

    def _add_read(self, event: Event, body: list[bytes]) -> bool:
        """As `_add_plain`, for an answer that is taken apart."""
        if type(event) is not TokenEvent:
            return self._add(event, body)
        choice = event.choice
        reader = self.readers[choice]
        was_reasoning = reader.is_reasoning
        text = self.choices[choice].push(event.token)
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
        if isinstance(event, Failure):
            body.append(error_event(event))
            return False
        if (output := self.output_of(event)) is not None:
            self._add_output(output, body)
            if output.reason is not None:
                body.append(self.shape.finish_chunk(output.choice, output.reason))
        return True

    def _add_output(self, output: Output, body: list[bytes]) -> None:
        """The last of the deltas that tokens bring together has their logprobs."""
        choice, deltas = output.choice, output.deltas
        if not deltas and output.notes and self.request.num_logprobs is not None:
            deltas = (ContentDelta(""),)
        for index, delta in enumerate(deltas, 1):
            notes = output.notes if index == len(deltas) else ()
            body.append(self.shape.delta_chunk(choice, delta, notes, self._offsets[choice]))
            self._offsets[choice] += len(delta.text) if type(delta) is ContentDelta else 0


def _text_of(prompt: PromptInput, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt.token_ids or ()) if prompt.text is None else prompt.text
