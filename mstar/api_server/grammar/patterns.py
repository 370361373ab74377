"""Regular expressions that strings of a schema follow: formats as patterns, and which patterns can be held to. Pure.

A pattern is matched against the JSON text of a string, where some characters are escaped: a pattern that asks for one
of those literally cannot be held to.
"""

from __future__ import annotations

import re

_DAYS = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]{1,12}(-[A-Za-z0-9]{1,12})?"
FORMATS = {
    "date": f"^{_DAYS}$",  # without the days that some years do not have
    "time": f"^{_CLOCK}$",
    "date-time": f"^{_DAYS}T{_CLOCK}$",
    "email": rf"^[A-Za-z0-9_%+-]{{1,24}}(\.[A-Za-z0-9_%+-]{{1,24}})?@{_LABEL}(\.{_LABEL}){{1,2}}$",
    "ipv4": rf"^{_OCTET}(\.{_OCTET}){{3}}$",
}
"""Formats that the compiler of grammars takes more widely than the standard."""
COMPILED_FORMATS = frozenset(
    {"uuid", "ipv6", "hostname", "uri", "uri-reference", "duration", "json-pointer", "relative-json-pointer"}
)
"""Formats that it knows as they are."""
UNKNOWN_FORMATS = frozenset({"regex", "iri", "iri-reference", "idn-email", "idn-hostname", "uri-template"})
"""Formats of the standard that it does not know."""

_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_RANGE = re.compile(r"\{\d*,\d*\}\??")
_ESCAPED = re.compile(r'["\x00-\x1f]|\\[\\"nrtfv0]|\\x(?:[01].|22|5[cC])|\\u00(?:[01].|22|5[cC])')
_ANCHORS = re.compile(r"(?<!\\)(?:\\\\)*[\^$]")
_AROUND = re.compile(r"^\^?(.*?)((?<!\\)(?:\\\\)*)\$?$", re.DOTALL)


def why_not_matched(pattern: str) -> str:
    """Why strings in JSON cannot be held to the pattern; empty: they can."""
    outside = _CLASS.sub("", pattern)
    if found := _ESCAPED.search(outside):
        return f"asks for {found[0]!r}, which JSON escapes"
    if _ANCHORS.search(without_anchors(outside)):
        return "has ^ or $ in its middle"
    return ""


def without_anchors(pattern: str) -> str:
    """The pattern of a whole text, without ^ at its beginning and $ at its end."""
    found = _AROUND.match(pattern)
    return pattern if found is None else found[1] + found[2]


def compiled(pattern: str) -> str:
    """The pattern as the compiler reads it right. It takes b for a text of `(ab+)?`, but not of `(|ab+)`; and bbb for
    one of `(c|b|b{0,2})`, but not of `(c|b|(b{0,2}()))`."""
    pieces: list[str] = []
    opened: list[int] = []
    atom = 0  # where what a quantifier would repeat begins
    at = 0
    while at < len(pattern):
        whole = _CLASS.match(pattern, at) or (pieces and _RANGE.match(pattern, at)) or None
        piece = whole[0] if whole else pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(piece)
        if piece[0] == "{" and len(piece) > 1:
            pieces[atom] = "(" + pieces[atom]
            pieces.append(piece + "())")
            continue
        begin = len(pieces)
        pieces.append(piece)
        if piece == "(":
            opened.append(begin)
        elif piece == ")" and opened:
            begin = opened.pop()
            if pattern[at : at + 1] == "?" and pattern[at + 1 : at + 2] not in ("?", "+"):
                at += 1
                inside = begin + 3 if pieces[begin + 1 : begin + 3] == ["?", ":"] else begin + 1
                pieces[inside] = "|" + pieces[inside]
        atom = begin
    return "".join(pieces)


def of_length(least: int, most: int | None) -> str:
    """Strings of so many characters, none of them escaped."""
    return f"^.{{{least},{'' if most is None else most}}}$"
