"""Tells reasoning from content in text that arrives in pieces. Pure; front loop only.

The result does not depend on where pieces begin. Line breaks at both ends of the reasoning, and those between it and
the content, belong to the format: chat templates write them around it and take them off again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mstar.api_server.answer.held_text import may_begin, num_held
from mstar.model.base import Markers


class Split(NamedTuple):
    """What a piece of text is."""

    reasoning: str
    content: str


class ReasoningSplit:
    """Follows one answer. `opens`: the prompt ends inside the reasoning; else there is reasoning only where the text
    begins with the opening marker, after white space or none. A marker that repeats what the prompt has opened is left
    out.

    `is_open`: what comes next is reasoning, or may be the marker that opens or closes it. `is_through`: the rest is
    content, unchanged. `end`: where the closing marker ended, in characters of the whole text; None before.
    """

    __slots__ = (
        "_closing",
        "_first",
        "_held",
        "_num_fed",
        "_opening",
        "_opens",
        "_spaces",
        "_state",
        "end",
        "is_open",
        "is_through",
    )

    def __init__(self, markers: Markers, *, opens: bool) -> None:
        self._opening, self._closing = markers
        self._first = markers.closing[0]
        self._opens = opens
        self._state: Callable[[str], Split] = self._begin
        self._held = ""
        self._spaces: list[str] = []
        self._num_fed = 0
        self.is_open = opens
        self.is_through = False
        self.end: int | None = None

    def passes(self, text: str) -> bool:
        """Whether `text` is reasoning as it is, with nothing before or in it to wait for. It is then counted as fed."""
        if self._state != self._reasoning or self._held or self._spaces or text[-1] == "\n" or self._first in text:
            return False
        self._num_fed += len(text)
        return True

    def feed(self, text: str) -> Split:
        """More text; what of it, and of what was held back, is known."""
        self._num_fed += len(text)
        return self._state(text)

    def flush(self) -> Split:
        """No more text: what was held back is what it looked like."""
        held = "".join(self._spaces) + self._held
        self._held = ""
        self._spaces.clear()
        if self._state == self._begin and self._opens:
            held = held.lstrip("\n")
        return Split(held, "") if self.is_open else Split("", held)

    def _begin(self, text: str) -> Split:
        """At the beginning: is there an opening marker?"""
        text = self._held + text
        if not self._held:
            bare = text.lstrip()
            self._spaces.append(text[: len(text) - len(bare)])
            text = bare
        self._held = ""
        if may_begin(text, self._opening):  # nothing yet, or a part of the marker
            self._held = text
            return Split("", "")
        if text.startswith(self._opening):
            self._spaces.clear()
            self.is_open = True
            self._state = self._first_reasoning
            return self._first_reasoning(text[len(self._opening) :])
        text = "".join(self._spaces) + text
        self._spaces.clear()
        if self._opens:
            self._state = self._first_reasoning
            return self._first_reasoning(text)
        return self._begin_content(text)

    def _first_reasoning(self, text: str) -> Split:
        text = text.lstrip("\n")
        if not text:
            return Split("", "")
        self._state = self._reasoning
        return self._reasoning(text)

    def _reasoning(self, text: str) -> Split:
        if self._held:
            text, self._held = self._held + text, ""
        at = text.find(self._closing)
        if at >= 0:
            behind = text[at + len(self._closing) :]
            self.end = self._num_fed - len(behind)
            self.is_open = False
            self._state = self._first_content
            reasoning = self._without_last_breaks(text[:at])
            self._spaces.clear()
            return Split(reasoning, self._first_content(behind).content)
        released = len(text) - num_held(text, self._closing)
        self._held = text[released:]
        return Split(self._without_last_breaks(text[:released]), "")

    def _without_last_breaks(self, text: str) -> str:
        """Line breaks wait for what follows them."""
        bare = text.rstrip("\n")
        if bare and self._spaces:
            released = "".join(self._spaces) + bare
            self._spaces.clear()
        else:
            released = bare
        if len(bare) < len(text):
            self._spaces.append(text[len(bare) :])
        return released

    def _first_content(self, text: str) -> Split:
        text = text.lstrip("\n")
        return self._begin_content(text) if text else Split("", "")

    def _begin_content(self, text: str) -> Split:
        self._state = self._content
        self.is_through = True
        return Split("", text)

    def _content(self, text: str) -> Split:
        return Split("", text)
