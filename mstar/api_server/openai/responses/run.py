"""Runs one response: from outputs to a whole one, or to a stream of typed events. Front loop only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Send
from tokenizers import Tokenizer

from mstar.api_server.errors import error_type
from mstar.api_server.front_state import new_id
from mstar.api_server.openai.adapter import TextRequest
from mstar.api_server.openai.logprobs import chat_logprobs
from mstar.api_server.openai.responses.chat import ChatOfResponse
from mstar.api_server.openai.responses.items import ResponseEvent, ResponseItems, Status
from mstar.api_server.openai.responses.schema import ResponseRequest
from mstar.api_server.openai.text_outputs import Output, TextOutputs
from mstar.api_server.token_text import TokenTexts
from mstar.conductor.events import Event, Failure, RefusedError
from mstar.conductor.handle import ConductorHandle

encode_json = msgspec.json.Encoder().encode
GIVEN_BACK = ("instructions", "max_output_tokens", "metadata", "model", "user")


class ResponseRun(TextOutputs):
    """One response that has been taken on. `asked` is what `chat` became."""

    def __init__(
        self,
        handle: ConductorHandle,
        body: ResponseRequest,
        chat: ChatOfResponse,
        asked: TextRequest,
        tokenizer: Tokenizer,
        texts: TokenTexts,
    ) -> None:
        """Raises `RefusedError` if the request is not taken on."""
        super().__init__(handle, asked, tokenizer)
        self.response_id = new_id("resp_")
        self._chat = chat
        self._texts = texts
        self._items = ResponseItems(new_id)
        self._num_events = 0
        self._head = _head(body, asked, self.response_id)

    async def whole(self) -> bytes:
        status, reason = "in_progress", None
        while events := await self.stream.take():
            for event in events:
                if isinstance(event, Failure):
                    raise RefusedError(event)
                if (output := self.output_of(event)) is not None:
                    self._add(output)
                    reason = output.reason
        if reason is not None:
            status = _status(reason)
            self._items.finish(status)
        return encode_json(self._response(status))

    async def write(self, events: Sequence[Event], send: Send) -> None:
        body = [self._encoded({"type": kind, "response": self._response("in_progress")}) for kind in OPENING]
        while events:
            for event in events:
                if isinstance(event, Failure):
                    body.append(self._error(self._chat.renamed(event)))
                elif (output := self.output_of(event)) is not None:
                    body += map(self._encoded, self._add(output))
                    if output.reason is not None:
                        body += map(self._encoded, self._end(_status(output.reason)))
            if body:
                await send({"type": "http.response.body", "body": b"".join(body), "more_body": True})
                body.clear()
            events = await self.stream.take()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _add(self, output: Output) -> list[ResponseEvent]:
        """The last of the deltas that tokens bring together has their logprobs."""
        num_top = self.request.num_logprobs
        logprobs: Sequence[dict[str, Any]] = ()
        if num_top is not None and output.notes:
            logprobs = chat_logprobs(output.notes, self._texts, num_top)["content"]
        events: list[ResponseEvent] = []
        for index, delta in enumerate(output.deltas, 1):
            events += self._items.add(delta, logprobs if index == len(output.deltas) else ())
        return events

    def _end(self, status: Status) -> list[ResponseEvent]:
        events = self._items.finish(status)
        return [*events, {"type": f"response.{status}", "response": self._response(status)}]

    def _response(self, status: str) -> dict[str, Any]:
        cut = status == "incomplete"
        ended = status != "in_progress"
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items.items if ended else [],
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage.as_json()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": usage["total_tokens"],
        }

    def _error(self, failure: Failure) -> bytes:
        """The last event of a stream that has failed: with the event's own fields, and in the shape of every error."""
        error = {"message": failure.message, "param": failure.param, "code": failure.code}
        return self._encoded({"type": "error", **error, "error": {**error, "type": error_type(failure.status)}})

    def _encoded(self, event: ResponseEvent) -> bytes:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return b"event: " + event["type"].encode() + b"\ndata: " + encode_json(event) + b"\n\n"


OPENING = ("response.created", "response.in_progress")


def _status(reason: str) -> Status:
    return "incomplete" if reason == "length" else "completed"


def _head(body: ResponseRequest, asked: TextRequest, response_id: str) -> dict[str, Any]:
    """What of a response is known from its request."""
    sampling = asked.generate.sampling
    given = body.model_dump(include={"text", "tools", "tool_choice"}, exclude_none=True, by_alias=True)
    tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in given.get("tools", ())]
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        **{name: getattr(body, name) for name in GIVEN_BACK},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": tools,
        "top_logprobs": max(0, sampling.num_logprobs),
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }
