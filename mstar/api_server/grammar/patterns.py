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

MAX_PATTERN = 4096
"""Characters of one pattern."""
_PIECES = re.compile(
    r"\\u\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\{\d*,\d*\}\??|.",
    re.DOTALL,
)
"""Escapes, classes, ranges of repetitions and other characters; a class that is not closed takes the rest, so that this
takes linear time."""
_BEYOND_ASCII = re.compile(r"\\[\0-\x7f]|\\?([^\0-\x7f])", re.DOTALL)
_CONTROL = r"(?:[\x00-\x1f]|\\[nrtfv0]|\\x[01].|\\u00[01].|\\u\{0*[01]?[0-9a-fA-F]\})"
_QUOTE = r'(?:\\?"|\\\\|\\(?:x|u00|u\{0*)(?:22|5[cC])\}?)'
_ESCAPED = re.compile(f"{_CONTROL}|{_QUOTE}", re.DOTALL)
_ESCAPED_CLASS = re.compile(rf"\[(?:{_CONTROL}(?:-{_CONTROL})?|{_QUOTE})+\]", re.DOTALL)
"""Of nothing else."""
_KNOWN_ESCAPE = re.compile(r"\\(?:[^A-Za-z0-9]|[dDwWsSnrtfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\})")
"""Escapes that the compiler knows. It takes others, such as the anchor \\A, for their letter."""
_CODE_POINT = re.compile(r"\\(?:u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_GROUP = re.compile(r"\(\?(?!:|P?<[A-Za-z_])")


def why_not_matched(pattern: str) -> str:
    """Why strings in JSON cannot be held to the pattern; empty: they can."""
    if len(pattern) > MAX_PATTERN:
        return f"has more than {MAX_PATTERN} characters"
    if found := _ESCAPED.search(_without_classes(pattern)):
        return f"asks for {found[0]!r}, which JSON escapes"
    if found := next(filter(_ESCAPED_CLASS.fullmatch, _PIECES.findall(pattern)), None):
        return f"asks for one of {found!r}, which JSON escapes"
    return why_not_whole(pattern)


def why_not_whole(pattern: str) -> str:
    """Why a whole text cannot be held to the pattern; empty: it can, for all that the compiler does not check."""
    outside = _without_classes(pattern)
    if found := _GROUP.search(outside):
        return f"has {found[0] + outside[found.end() : found.end() + 1]!r}, which is no group"
    if {"^", "$"}.intersection(_PIECES.findall(without_anchors(pattern))):
        return "has ^ or $ in its middle"
    if found := re.search(r"\\.?", _KNOWN_ESCAPE.sub("", pattern), re.DOTALL):
        return f"has {found[0]!r}, which is no escape that can be enforced"
    return why_no_text(pattern)


def why_no_text(text: str) -> str:
    """Why no text has a character that the pattern or grammar asks for by its number; empty: there are such texts. What
    a class leaves out need not be in any."""
    asked = "".join(piece for piece in _PIECES.findall(text) if not piece.startswith("[^"))
    for found in _CODE_POINT.finditer(asked):
        code = int(found[1] or found[2] or found[3] or "0", 16)
        if 0xD800 <= code <= 0xDFFF:
            return f"asks for {found[0]!r}, half of a pair of UTF-16; write the whole character"
        if code > 0x10FFFF:
            return f"asks for {found[0]!r}, which is beyond the last character"
    return ""


def _without_classes(pattern: str) -> str:
    return "".join(piece for piece in _PIECES.findall(pattern) if piece[0] != "[")


def without_anchors(pattern: str) -> str:
    """The pattern of a whole text, without ^ at its beginning and $ at its end."""
    pieces = _PIECES.findall(pattern)
    return "".join(pieces[pieces[:1] == ["^"] : len(pieces) - (pieces[-1:] == ["$"])])


def compiled(pattern: str) -> str:
    """The pattern as the compiler reads it right. It takes b for a text of `(ab+)?`, but not of `(|ab+)`; and bbb for
    one of `(c|b|b{0,2})`, but not of `(c|b|(b{0,2}()))`. That a text stands in JSON it forgets where the pattern has
    characters beyond ASCII, unless those are written by their numbers."""
    pattern = _BEYOND_ASCII.sub(lambda found: rf"\u{{{ord(found[1]):x}}}" if found[1] else found[0], pattern)
    pieces: list[str] = []
    opened: list[int] = []
    atom = 0  # where what a quantifier would repeat begins
    found = _PIECES.findall(pattern)
    for index, piece in enumerate(found):
        if piece[:1] == "{" and len(piece) > 1 and pieces:
            pieces[atom] = "(" + pieces[atom]
            pieces.append(piece + "())")
            continue
        begin = len(pieces)
        pieces.append(piece)
        if piece == "(":
            opened.append(begin)
        elif piece == ")" and opened:
            begin = opened.pop()
            if found[index + 1 : index + 2] == ["?"] and found[index + 2 : index + 3] not in (["?"], ["+"]):
                inside = begin + 3 if pieces[begin + 1 : begin + 3] == ["?", ":"] else begin + 1
                pieces[inside] = "|" + pieces[inside]
                found[index + 1] = ""
        atom = begin
    return "".join(pieces)
