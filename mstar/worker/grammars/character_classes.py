"""Classes of characters in a regular expression, as a grammar writes them for strings in JSON. Pure.

xgrammar has masks ready for a repetition of any length if its class is written by what it leaves out.
"""

from __future__ import annotations

import re

Interval = tuple[int, int]
"""Code points, both ends included."""
LAST = 0x10FFFF
ESCAPED_IN_JSON: tuple[Interval, ...] = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_KINDS: dict[str, tuple[Interval, ...]] = {
    "\\d": ((0x30, 0x39),),
    "\\w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
CODE_POINT = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\})"
_MEMBER = re.compile(rf"{CODE_POINT}|\\.|.", re.DOTALL)
CLASS = r"(?:\.|\\[dw]|\[(?:\\.|[^\\\]])+\])"
"""A pattern of what `json_class` may know."""


def json_class(piece: str) -> str:
    """A piece of a pattern that stands for one character, in EBNF. Empty: it has what is not known here, or nothing."""
    if piece == ".":
        return _written(ESCAPED_IN_JSON)
    if piece in _KINDS:
        return _written((*_without(_KINDS[piece]), *ESCAPED_IN_JSON))
    is_negated = piece.startswith("[^")
    members = _MEMBER.findall(piece[1 + is_negated : -1])
    intervals: list[Interval] = []
    index = 0
    while index < len(members):
        if members[index] in _KINDS:
            intervals += _KINDS[members[index]]
            index += 1
            continue
        first = last = _code(members[index])
        if members[index + 1 : index + 2] == ["-"] and index + 2 < len(members):
            last = _code(members[index + 2])
            index += 2
        elif members[index] == "-" and 0 < index < len(members) - 1:
            return ""  # after a range: its meaning differs between dialects
        index += 1
        if not 0 <= first <= last:
            return ""
        intervals.append((first, last))
    left_out = intervals if is_negated else _without(intervals)
    return _written((*left_out, *ESCAPED_IN_JSON)) if intervals else ""


def _code(member: str) -> int:
    """-1: not known."""
    if len(member) == 1:
        return -1 if member == "[" else ord(member)
    if len(member) > 2:
        return int(member[2:].strip("{}"), 16)
    return ord(member[1]) if not member[1].isalnum() else -1


def _without(intervals: tuple[Interval, ...] | list[Interval]) -> list[Interval]:
    """All other characters."""
    others: list[Interval] = []
    begin = 0
    for first, last in sorted(intervals):
        if begin < first:
            others.append((begin, first - 1))
        begin = max(begin, last + 1)
    return others if begin > LAST else [*others, (begin, LAST)]


def _written(left_out: tuple[Interval, ...]) -> str:
    if not (taken := _without(left_out)):
        return ""
    return "[^" + "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in _without(taken)) + "]"
