"""Reads one choice's text as an answer: reasoning first, then content with tool calls in it. Front loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mstar.api_server.answer.deltas import AnswerDelta, CallDelta, ContentDelta, ReasoningDelta, ToolCall
from mstar.api_server.answer.function_tags import FunctionTags
from mstar.api_server.answer.reasoning import ReasoningSplit
from mstar.model.base import Markers


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a request's answers are taken apart. `reasoning`: None, it is not told apart. `tools`: JSON schemas of the
    arguments of each tool that may be called, None: no call is looked for."""

    reasoning: Markers | None
    tools: Mapping[str, Mapping[str, Any]] | None


class AnswerReader:
    """One choice. `num_reasoning_tokens`: counted by whoever feeds it, who knows which tokens a text is of."""

    __slots__ = ("_split", "_tags", "num_reasoning_tokens")

    def __init__(self, form: AnswerFormat, *, opens_reasoning: bool, new_id: Callable[[], str]) -> None:
        self.num_reasoning_tokens = 0
        self._split = None if form.reasoning is None else ReasoningSplit(form.reasoning, opens=opens_reasoning)
        self._tags = None if form.tools is None else FunctionTags(form.tools, new_id)

    @property
    def is_reasoning(self) -> bool:
        """What comes next belongs to the reasoning."""
        return self._split is not None and self._split.is_open

    def has_reasoning_at(self, offset: int) -> bool:
        """Whether the text at `offset` characters belongs to the reasoning, its markers included; for what was fed."""
        split = self._split
        return split is not None and (split.is_open if split.end is None else offset < split.end)

    def passes_as_content(self, text: str) -> bool:
        """Whether `text` is all content, and nothing before it waits; it is then taken as fed."""
        split, tags = self._split, self._tags
        return (split is None or split.is_through) and (tags is None or tags.passes(text))

    def passes_as_reasoning(self, text: str) -> bool:
        """As `passes_as_content`, for reasoning."""
        split = self._split
        return split is not None and split.is_open and split.passes(text)

    def feed(self, text: str) -> list[AnswerDelta]:
        """More text, at least a character; what is known by it."""
        split = self._split
        if split is None:
            return self._content(text)
        reasoning, content = split.feed(text)
        if not reasoning:
            return self._content(content) if content else []
        deltas: list[AnswerDelta] = [ReasoningDelta(reasoning)]
        if content:
            deltas += self._content(content)
        return deltas

    def finish(self, *, is_whole: bool) -> list[AnswerDelta]:
        """No more text. `is_whole`: the model ended here by itself."""
        deltas: list[AnswerDelta] = []
        if self._split is not None:
            reasoning, content = self._split.flush()
            if reasoning:
                deltas.append(ReasoningDelta(reasoning))
            if content:
                deltas += self._content(content)
        if self._tags is not None:
            deltas += self._tags.finish(is_whole=is_whole)
        return deltas

    def reason(self, reason: str) -> str:
        """The finish reason, when the tokens ended for `reason`: calls that are complete are what the answer was."""
        tags = self._tags
        has_calls = tags is not None and tags.num_calls > 0 and not tags.is_in_call
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _content(self, text: str) -> list[AnswerDelta]:
        return [ContentDelta(text)] if self._tags is None else self._tags.feed(text)


class WholeAnswer:
    """Deltas of a choice, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallDelta, list[str]]] = []

    def add(self, delta: AnswerDelta) -> None:
        match delta:
            case ContentDelta(text):
                self._content.append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case CallDelta():
                self._calls.append((delta, []))
            case _:
                self._calls[delta.call][1].append(delta.text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        return [ToolCall(call.call_id, call.name, "".join(arguments)) for call, arguments in self._calls]
