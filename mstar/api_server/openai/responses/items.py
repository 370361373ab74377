"""The items of one response, as an answer's deltas make them, and the events that tell of it. Pure.

One item is open at a time: a reasoning, a message or a call. What comes of another kind closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from mstar.api_server.answer.deltas import AnswerDelta, ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta

ResponseEvent = dict[str, Any]
"""An event of a stream, as JSON."""
NewId = Callable[[str], str]
Status = Literal["completed", "incomplete"]


class ResponseItems:
    """`items`: those that are closed, in order. Events lack their sequence numbers."""

    def __init__(self, new_id: NewId) -> None:
        """`new_id` makes an id that begins as given."""
        self.items: list[dict[str, Any]] = []
        self._new_id = new_id
        self._item: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, delta: AnswerDelta, logprobs: Sequence[dict[str, Any]] = ()) -> list[ResponseEvent]:
        """More of the answer. `logprobs`: of the tokens that it completes; only a message shows them."""
        match delta:
            case ContentDelta(text):
                events = self._open("message")
                self._logprobs.extend(logprobs)
                return [*events, self._said("response.output_text.delta", text, logprobs=list(logprobs))]
            case ReasoningDelta(text):
                return [*self._open("reasoning"), self._said("response.reasoning_text.delta", text)]
            case CallDelta():
                return self._open("function_call", delta)
            case ArgumentsDelta(text=text):
                return [self._said("response.function_call_arguments.delta", text)]

    def finish(self, status: Status) -> list[ResponseEvent]:
        """No more. An answer without a word is an empty message."""
        says_nothing = self._item is None and all(item["type"] == "reasoning" for item in self.items)
        opened = self._open("message") if says_nothing and status == "completed" else []
        return [*opened, *self._close(status)]

    def _open(self, kind: str, call: CallDelta | None = None) -> list[ResponseEvent]:
        if self._item is not None and self._item["type"] == kind and call is None:
            return []
        events = self._close("completed")
        item: dict[str, Any]
        if call is not None:
            item = {"id": self._new_id("fc_"), "type": kind, "call_id": call.call_id, "name": call.name}
            item |= {"arguments": "", "status": "in_progress"}
        elif kind == "message":
            item = {"id": self._new_id("msg_"), "type": kind, "role": "assistant", "content": []}
            item["status"] = "in_progress"
        else:
            item = {"id": self._new_id("rs_"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
        self._item = item
        events.append({"type": "response.output_item.added", "output_index": len(self.items), "item": dict(item)})
        if call is None:
            events.append(self._event("response.content_part.added", part=self._part("")))
        return events

    def _close(self, status: Status) -> list[ResponseEvent]:
        item = self._item
        if item is None:
            return []
        text = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            part = self._part(text)
            item["content"] = [part]
            if item["type"] == "message":
                events = [self._event("response.output_text.done", text=text, logprobs=part["logprobs"])]
            else:
                events = [self._event("response.reasoning_text.done", text=text)]
            events.append(self._event("response.content_part.done", part=part))
        item["status"] = status
        events.append({"type": "response.output_item.done", "output_index": len(self.items), "item": item})
        self.items.append(item)
        self._item, self._texts, self._logprobs = None, [], []
        return events

    def _said(self, kind: str, text: str, **more: Any) -> ResponseEvent:
        self._texts.append(text)
        return self._event(kind, delta=text, **more)

    def _part(self, text: str) -> dict[str, Any]:
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _event(self, kind: str, **more: Any) -> ResponseEvent:
        item = self._item
        assert item is not None
        event = {"type": kind, "item_id": item["id"], "output_index": len(self.items)}
        if item["type"] != "function_call":
            event["content_index"] = 0
        return {**event, **more}
