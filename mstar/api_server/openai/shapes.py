"""What chat and text completions look like, whole and in chunks. Pure; chunks are bytes put together by hand.

A shape belongs to one request. Everything of a chunk but the text is made once, so that a token costs the escaping of
its text and one join.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from mstar.api_server.answer.deltas import AnswerDelta, ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta
from mstar.api_server.answer.reader import WholeAnswer
from mstar.api_server.openai.logprobs import TokenNote, chat_logprobs, completion_logprobs
from mstar.api_server.token_text import TokenTexts

encode_json = msgspec.json.Encoder().encode


class ResponseShape(ABC):
    """`parts[choice]`: bytes before and after the JSON string of a delta without logprobs; `reasoning_parts[choice]`:
    those of reasoning, for a chat."""

    whole_kind: str
    chunk_kind: str
    delta_key: bytes
    delta_end: bytes

    def __init__(
        self,
        *,
        response_id: str,
        created: int,
        model: str,
        num_results: int,
        num_logprobs: int | None,
        texts: TokenTexts,
        includes_usage: bool,
    ) -> None:
        self._num_logprobs = num_logprobs
        self._texts = texts
        self._head = {"id": response_id, "object": self.whole_kind, "created": created, "model": model}
        chunk = encode_json({**self._head, "object": self.chunk_kind})[:-1]
        self._opening = b"data: " + chunk + b',"choices":'
        self._closing = b',"usage":null}\n\n' if includes_usage else b"}\n\n"
        after = self.delta_end + b',"logprobs":null,"finish_reason":null}]' + self._closing
        self.parts = [
            (self._opening + b'[{"index":%d,' % choice + self.delta_key, after) for choice in range(num_results)
        ]
        self.reasoning_parts = [
            (before.replace(b'{"content":', b'{"reasoning_content":'), after) for before, after in self.parts
        ]

    def opening_chunk(self, choice: int) -> bytes:
        """What a choice begins with."""
        return b""

    def delta_chunk(self, choice: int, delta: AnswerDelta, notes: Sequence[TokenNote], offset: int) -> bytes:
        """A delta, with the logprobs of the tokens that it completes."""
        before, after = self.parts[choice]
        if type(delta) is ContentDelta:
            inside = before + encode_json(delta.text)
        else:
            inside = self.special_delta(before, delta)
        if self._num_logprobs is None:
            return inside + after
        logprobs = encode_json(self.logprobs(notes, offset))
        tail = b',"logprobs":' + logprobs + b',"finish_reason":null}]' + self._closing
        return inside + self.delta_end + tail

    def finish_chunk(self, choice: int, reason: str) -> bytes:
        before, _ = self.parts[choice]
        empty = self.empty_delta(before)
        return empty + b',"logprobs":null,"finish_reason":"' + reason.encode() + b'"}]' + self._closing

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return self._opening + b'[],"usage":' + encode_json(usage) + b"}\n\n"

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return encode_json({**self._head, "choices": choices, "usage": usage})

    def logprobs(self, notes: Sequence[TokenNote], offset: int) -> dict[str, Any] | None:
        """`offset`: characters of the choice's text before these tokens."""
        if self._num_logprobs is None:
            return None
        return self.format_logprobs(notes, offset, self._num_logprobs)

    @abstractmethod
    def empty_delta(self, before: bytes) -> bytes: ...
    @abstractmethod
    def special_delta(self, before: bytes, delta: AnswerDelta) -> bytes:
        """`before` with a delta that is not content in its place, up to where `delta_end` follows."""

    @abstractmethod
    def format_logprobs(self, notes: Sequence[TokenNote], offset: int, num_top: int) -> dict[str, Any]: ...
    @abstractmethod
    def choice(self, index: int, answer: WholeAnswer, notes: Sequence[TokenNote], reason: str) -> dict[str, Any]:
        """One entry of `choices` of the whole response."""


class ChatShape(ResponseShape):
    """Of a chat completion: choices have a message, whole or as deltas."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    delta_key = b'"delta":{"content":'
    delta_end = b"}"

    def opening_chunk(self, choice: int) -> bytes:
        before, after = self.parts[choice]
        return before.replace(b'{"content":', b'{"role":"assistant","content":') + b'""' + after

    def empty_delta(self, before: bytes) -> bytes:
        return before.removesuffix(b'"content":') + b"}"

    def format_logprobs(self, notes: Sequence[TokenNote], offset: int, num_top: int) -> dict[str, Any]:
        return chat_logprobs(notes, self._texts, num_top)

    def special_delta(self, before: bytes, delta: AnswerDelta) -> bytes:
        start = before.removesuffix(b'{"content":')
        match delta:
            case ReasoningDelta(text):
                return start + b'{"reasoning_content":' + encode_json(text)
            case CallDelta(index, call_id, name):
                call = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
                return start + b'{"tool_calls":[' + encode_json(call) + b"]"
            case ArgumentsDelta(index, text):
                head = b'{"tool_calls":[{"index":%d,"function":{"arguments":' % index
                return start + head + encode_json(text) + b"}}]"
            case _:
                return before + encode_json(delta.text)

    def choice(self, index: int, answer: WholeAnswer, notes: Sequence[TokenNote], reason: str) -> dict[str, Any]:
        """Content is null only beside tool calls."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls := answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return {"index": index, "message": message, "logprobs": self.logprobs(notes, 0), "finish_reason": reason}


class CompletionShape(ResponseShape):
    """Of a text completion: choices have a text."""

    whole_kind = "text_completion"
    chunk_kind = "text_completion"
    delta_key = b'"text":'
    delta_end = b""

    def empty_delta(self, before: bytes) -> bytes:
        return before + b'""'

    def format_logprobs(self, notes: Sequence[TokenNote], offset: int, num_top: int) -> dict[str, Any]:
        return completion_logprobs(notes, self._texts, num_top, offset)

    def special_delta(self, before: bytes, delta: AnswerDelta) -> bytes:
        raise AssertionError("a text completion is not taken apart")

    def choice(self, index: int, answer: WholeAnswer, notes: Sequence[TokenNote], reason: str) -> dict[str, Any]:
        return {"index": index, "text": answer.content, "logprobs": self.logprobs(notes, 0), "finish_reason": reason}
