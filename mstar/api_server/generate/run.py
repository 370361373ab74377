"""Runs one request of `/generate`: from the conductor's events to typed events, one by one or put together. Front loop
only.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Send
from tokenizers import Tokenizer

from mstar.api_server.answer.deltas import ContentDelta
from mstar.api_server.errors import error_type
from mstar.api_server.openai.adapter import TextRequest
from mstar.api_server.openai.logprobs import TokenNote, finite
from mstar.api_server.openai.text_outputs import Output, TextOutputs
from mstar.conductor.events import Event, Failure, FinishedEvent, PreparedEvent, RefusedError, TensorEvent, TokenEvent
from mstar.conductor.handle import ConductorHandle

encode_json = msgspec.json.Encoder().encode
Told = dict[str, Any]
"""What a client is told: an event of a stream, as JSON."""


class GenerateRun(TextOutputs):
    """One request that has been taken on."""

    keeps_notes = True

    def __init__(self, handle: ConductorHandle, asked: TextRequest, tokenizer: Tokenizer | None, run_id: str) -> None:
        """`tokenizer`: None, then tokens have no text. Raises `RefusedError` if the request is not taken on."""
        super().__init__(handle, asked, tokenizer)
        self.run_id = run_id
        self._num_finished = 0
        self._modality_of: Mapping[str, str] = handle.modality_of

    async def whole(self) -> bytes:
        choices: list[dict[str, Any]] = [
            {"index": index, "text": "", "tokens": [], "logprobs": [], "tensors": [], "finish_reason": ""}
            for index in range(self.num_results)
        ]
        while events := await self.stream.take():
            for event in events:
                if isinstance(event, Failure):
                    raise RefusedError(event)
                for told in self.told_of(event):
                    _gather(told, choices)
        if self.request.num_logprobs is None:
            for choice in choices:
                choice["logprobs"] = None
        body = {"id": self.run_id, "model": self.request.model, "choices": choices, "usage": self.usage.as_json()}
        return encode_json(body)

    async def write(self, events: Sequence[Event], send: Send) -> None:
        while events:
            body = b"".join(_encoded(told) for event in events for told in self.told_of(event))
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            events = await self.stream.take()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def told_of(self, event: Event) -> list[Told]:
        """What a client is told of an event."""
        match event:
            case PreparedEvent():
                self.output_of(event)
                return [{"type": "prepared", "id": self.run_id, "prompt_tokens": event.num_tokens}]
            case TokenEvent() if self.tokenizer is None or self._modality_of.get(event.signal) != "text":
                self.choices[event.choice].push(event.token)
                return [{"type": "token", "choice": event.choice, "signal": event.signal, "token": event.token}]
            case TensorEvent():
                return [self._tensor(event)]
            case Failure():
                error = {"message": event.message, "type": error_type(event.status), "param": event.param}
                return [{"type": "error", "error": {**error, "code": event.code}}]
            case TokenEvent() | FinishedEvent():
                output = self.output_of(event)
                return [] if output is None else self._told_of_output(output)

    def _told_of_output(self, output: Output) -> list[Told]:
        events: list[Told] = []
        text = "".join(delta.text for delta in output.deltas if isinstance(delta, ContentDelta))
        if text or output.notes:
            tokens = [note.token for note in output.notes]
            told: Told = {"type": "text", "choice": output.choice, "text": text, "tokens": tokens}
            if self.request.num_logprobs is not None:
                told["logprobs"] = [self._logprobs(note) for note in output.notes]
            events.append(told)
        if output.reason is not None:
            self._num_finished += 1
            finished: Told = {"type": "finished", "choice": output.choice, "finish_reason": output.reason}
            if self._num_finished == self.num_results:
                finished["usage"] = self.usage.as_json()
            events.append(finished)
        return events

    def _logprobs(self, note: TokenNote) -> dict[str, Any]:
        logprobs, num_top = note.logprobs, self.request.num_logprobs or 0
        top = zip(logprobs.top_ids[:num_top], logprobs.top_logprobs[:num_top], strict=True)
        return {
            "token": note.token,
            "logprob": finite(logprobs.logprob),
            "top": [{"token": token, "logprob": finite(logprob)} for token, logprob in top],
        }

    def _tensor(self, event: TensorEvent) -> Told:
        tensor = event.tensor
        return {
            "type": "tensor",
            "choice": event.choice,
            "signal": event.signal,
            "modality": self._modality_of.get(event.signal, ""),
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data": b64encode(tensor.data).decode(),
        }


def _gather(told: Told, choices: list[dict[str, Any]]) -> None:
    match told["type"]:
        case "text":
            choice = choices[told["choice"]]
            choice["text"] += told["text"]
            choice["tokens"] += told["tokens"]
            choice["logprobs"] += told.get("logprobs", ())
        case "token":
            choices[told["choice"]]["tokens"].append(told["token"])
        case "tensor":
            choices[told["choice"]]["tensors"].append(
                {name: told[name] for name in ("signal", "modality", "dtype", "shape", "data")}
            )
        case "finished":
            choices[told["choice"]]["finish_reason"] = told["finish_reason"]
        case _:
            pass


def _encoded(told: Told) -> bytes:
    return b"event: " + told["type"].encode() + b"\ndata: " + encode_json(told) + b"\n\n"
