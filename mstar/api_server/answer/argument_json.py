"""Writes the JSON object of a call's arguments while their values arrive as text. Pure; front loop only.

A string is written as it comes; what may be another type waits for the end of its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mstar.api_server.answer.argument_kinds import argument_kinds, json_value

_encode = msgspec.json.encode
STRING = frozenset({"string"})
MAYBE_STRING = frozenset({"string", "null"})
MAX_NULL_CHARS = 8
"""Of a `null` with white space around it, where a string may stand."""


class ArgumentWriter:
    """One call. Every method returns the JSON text that can be written now; joined, it is an object once `close` was
    called. `parameters`: JSON schema of the arguments (empty: they may be anything)."""

    __slots__ = ("_is_string", "_kinds", "_parameters", "_prefix", "_waiting")

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        self._prefix = "{"
        self._kinds = STRING
        self._is_string = False
        self._waiting: list[str] = []

    def begin(self, key: str) -> str:
        """The value of `key` follows."""
        self._kinds = argument_kinds(self._parameters, key)
        self._is_string = self._kinds == STRING
        self._waiting.clear()
        text = f"{self._prefix}{_encode(key).decode()}:"
        self._prefix = ","
        return text + '"' if self._is_string else text

    def value(self, text: str) -> str:
        """More of the value."""
        if self._is_string:
            return _escaped(text)
        self._waiting.append(text)
        if self._kinds == MAYBE_STRING:
            whole = "".join(self._waiting)
            if len(whole) > MAX_NULL_CHARS or not "null".startswith(whole.strip()):
                self._is_string = True
                self._waiting.clear()
                return '"' + _escaped(whole)
        return ""

    def end(self) -> str:
        """The value is complete."""
        return '"' if self._is_string else json_value("".join(self._waiting), self._kinds)

    def close(self) -> str:
        """The object is complete."""
        return "{}" if self._prefix == "{" else "}"


def _escaped(text: str) -> str:
    """The inside of a JSON string: each character by itself, so pieces may be joined."""
    return _encode(text)[1:-1].decode()
