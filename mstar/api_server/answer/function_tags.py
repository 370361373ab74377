"""Finds tool calls in text that arrives in pieces, in the form with tags. Pure; front loop only.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The result does not depend on where pieces begin. One line break at each end of a value belongs to the format, and so
does white space around a call. What begins like a call and goes on differently is content. The closing tags of a
function and of a call may be missing; a value ends with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mstar.api_server.answer.argument_json import ArgumentWriter
from mstar.api_server.answer.deltas import AnswerDelta, ArgumentsDelta, CallDelta, ContentDelta
from mstar.api_server.answer.held_text import may_begin, num_held

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
MAX_GAP_CHARS = 256
"""Of the white space before a tag of a call that has not begun yet."""


class FunctionTags:
    """Follows the content of one answer. `parameters`: JSON schemas of the tools' arguments, by the tool's name.

    `num_calls`: calls that have begun. `is_in_call`: the last of them is not complete."""

    __slots__ = (
        "_closes_space",
        "_marker",
        "_new_id",
        "_parameters",
        "_spaces",
        "_state",
        "_text",
        "_writer",
        "is_in_call",
        "num_calls",
    )

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str]) -> None:
        self._parameters = parameters
        self._new_id = new_id
        self._state: Callable[[list[AnswerDelta]], bool] = self._content
        self._text = ""
        self._marker = ""
        self._spaces: list[str] = []
        self._closes_space = False
        self._writer = ArgumentWriter({})
        self.num_calls = 0
        self.is_in_call = False

    def passes(self, text: str) -> bool:
        """Whether `text` is content as it is, with nothing before or in it to wait for."""
        return not (
            self._text
            or self._spaces
            or self._closes_space
            or "<" in text
            or text[-1].isspace()
            or self._state != self._content
        )

    def feed(self, text: str) -> list[AnswerDelta]:
        """More content; what of it, and of what was held back, is known."""
        self._text = self._text + text if self._text else text
        deltas: list[AnswerDelta] = []
        while self._state(deltas):
            pass
        return deltas

    def finish(self, *, is_whole: bool) -> list[AnswerDelta]:
        """No more content. `is_whole`: the model ended here by itself, so a call that lacks closing tags has all its
        arguments; else they are left as they are."""
        deltas: list[AnswerDelta] = []
        text, self._text = self._text, ""
        if self._state == self._content:
            self._emit(text, deltas)
        elif self._state == self._head:
            self._emit(self._marker + text, deltas)
        elif self._state in (self._first_value, self._value):
            if is_whole:
                text = text[: len(text) - num_held(text, END_PARAMETER)].removesuffix("\n")
            self._write(self._writer.value(text), deltas)
            if is_whole:
                self._write(self._writer.end(), deltas)
        if self._spaces and not self.num_calls:
            deltas.append(ContentDelta("".join(self._spaces)))
        if is_whole and self.is_in_call:
            self._close(deltas)
        return deltas

    # Each state looks at `_text`, takes what it can from it, and says whether the next one can go on.

    def _content(self, deltas: list[AnswerDelta]) -> bool:
        text = self._text
        at = text.find(CALL)
        if at >= 0:
            self._text = text[at + len(CALL) :]
            self._emit(text[:at], deltas)
            self._marker = CALL
            self._state = self._head
            return True
        released = len(text) - num_held(text, CALL)
        self._text = text[released:]
        self._emit(text[:released], deltas)
        return False

    def _head(self, deltas: list[AnswerDelta]) -> bool:
        """Behind the tag that opens a call: only with the tag behind the function's name it counts as one."""
        text = self._text.lstrip()
        gap = len(self._text) - len(text)
        if gap <= MAX_GAP_CHARS and may_begin(text, FUNCTION):
            return False
        if gap <= MAX_GAP_CHARS and text.startswith(FUNCTION):
            name, found, behind = text[len(FUNCTION) :].partition(">")
            is_name = len(name) <= MAX_NAME_CHARS and "\n" not in name and "<" not in name
            if is_name and not found:
                return False
            following = behind.lstrip()
            is_near = is_name and bool(name.strip()) and len(behind) - len(following) <= MAX_GAP_CHARS
            if is_near and may_begin(following, PARAMETER, END_FUNCTION, END_CALL):
                return False
            if is_near and following.startswith((PARAMETER, END_FUNCTION, END_CALL)):
                self._text = following
                self._open(name.strip(), deltas)
                return True
        self._emit(self._marker, deltas)
        self._state = self._content
        return True

    def _open(self, name: str, deltas: list[AnswerDelta]) -> None:
        self._spaces.clear()
        self._writer = ArgumentWriter(self._parameters.get(name, {}))
        deltas.append(CallDelta(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        self.is_in_call = True
        self._state = self._between

    def _between(self, deltas: list[AnswerDelta]) -> bool:
        """Between parameters; whatever is no tag is left out."""
        text = self._text
        at = text.find("<")
        if at < 0:
            self._text = ""
            return False
        self._text = text = text[at:]
        if text.startswith((END_FUNCTION, END_CALL)):
            self._close(deltas)
            self._state = self._behind
            self._text = text.removeprefix(END_FUNCTION)
            return True
        if text.startswith(PARAMETER):
            key, found, behind = text[len(PARAMETER) :].partition(">")
            if len(key) <= MAX_NAME_CHARS and not found:
                return False
            if len(key) <= MAX_NAME_CHARS and key.strip():
                self._write(self._writer.begin(key.strip()), deltas)
                self._text = behind
                self._state = self._first_value
                return True
        elif may_begin(text, PARAMETER, END_FUNCTION, END_CALL):
            return False
        self._text = text[1:]
        return True

    def _first_value(self, deltas: list[AnswerDelta]) -> bool:
        if not self._text:
            return False
        self._text = self._text.removeprefix("\n")
        self._state = self._value
        return True

    def _value(self, deltas: list[AnswerDelta]) -> bool:
        text = self._text
        at = text.find(END_PARAMETER)
        if at >= 0:
            self._text = text[at + len(END_PARAMETER) :]
            self._write(self._writer.value(text[:at].removesuffix("\n")), deltas)
            self._write(self._writer.end(), deltas)
            self._state = self._between
            return True
        released = len(text) - num_held(text, END_PARAMETER)
        if released and text[released - 1] == "\n":
            released -= 1
        self._text = text[released:]
        if released:
            self._write(self._writer.value(text[:released]), deltas)
        return False

    def _behind(self, deltas: list[AnswerDelta]) -> bool:
        """Behind a function: the end of the call, or another function in it."""
        text = self._text = self._text.lstrip()
        if may_begin(text, END_CALL, FUNCTION):
            return False
        if text.startswith(FUNCTION):
            self._marker = ""
            self._state = self._head
        else:
            self._text = text.removeprefix(END_CALL)
            self._state = self._content
        return True

    def _close(self, deltas: list[AnswerDelta]) -> None:
        self._write(self._writer.close(), deltas)
        self.is_in_call = False
        self._closes_space = True

    def _write(self, text: str, deltas: list[AnswerDelta]) -> None:
        if text:
            deltas.append(ArgumentsDelta(self.num_calls - 1, text))

    def _emit(self, text: str, deltas: list[AnswerDelta]) -> None:
        """Content; white space at its end waits, because it belongs to a call that may follow."""
        bare = text.rstrip()
        if bare:
            if self._closes_space:
                self._spaces.clear()
                bare_from = len(text) - len(text.lstrip())
                bare, text = bare[bare_from:], text[bare_from:]
            self._closes_space = False
            deltas.append(ContentDelta("".join(self._spaces) + bare))
            self._spaces.clear()
        if len(bare) < len(text):
            self._spaces.append(text[len(bare) :])
