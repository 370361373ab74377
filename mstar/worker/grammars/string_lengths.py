"""JSON strings of a bounded length, as xgrammar counts them, without the control characters that it lets in. Pure.

Its own rule for such a string repeats one class of characters up to the closing quote, which its masks are ready for at
any length; that class has all control characters but line breaks, which JSON escapes. Of a pattern that repeats some
character more than a hundred times each mask is found token by token: one that ends so is written as such a rule, too.

Runs where grammars are compiled: on a thread beside the worker's loop, and in the process of trials.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mstar.worker.grammars.character_classes import CLASS, CODE_POINT, json_class
from mstar.worker.grammars.native import load_core

KEYWORDS = ("minLength", "maxLength", "pattern")
LONG = 32
"""Repetitions that a pattern has few enough of below."""
THEIR_CLASS, OUR_CLASS = r"[^\"\\\r\n]", r"[^\"\\\0-\x1f]"
"""As xgrammar writes them. In what it writes of JSON the first is nothing else: a literal has no bare quote before a
backslash."""

_PATTERN = re.compile(r'^(\w+) ::= Regex\("((?:[^"\\]|\\[^\w\s])*)", json_string=true\)$', re.MULTILINE)
"""A rule that is a client's pattern, and the pattern."""
_USED = re.compile(r'"\\"" (\w+) "\\""')
"""Where such a rule stands, in the quotes of a string."""
_ONCE = rf"(?:{CLASS}|{CODE_POINT}|\\[^A-Za-z0-9]|[^\\\[\](){{}}|.*+?^$])\??"
_COUNT = r"\{(?P<least>\d{1,9})(?P<comma>,?)(?P<most>\d{0,9})\}"
_LONG = re.compile(rf"\^(?P<head>(?:{_ONCE})*)\(?(?P<piece>{CLASS}){_COUNT}(?:\(\)\))?\$")
"""A whole pattern that repeats a character at its end and nothing before; see `mstar.api_server.grammar.patterns` for
the empty group, which such a repetition may have behind it."""


def exact_lengths(form: Any) -> Any:
    """A format of a structural tag, in which JSON schemas with bounded strings are grammars of their own.

    Raises:
        RuntimeError: from xgrammar, for what it takes for no schema.
    """
    if isinstance(form, list):
        return [exact_lengths(part) for part in form]
    if not isinstance(form, Mapping):
        return form
    if form.get("type") != "json_schema":
        return {key: exact_lengths(part) for key, part in form.items()}
    return _as_grammar(form) if any(keyword in json.dumps(form) for keyword in KEYWORDS) else form


def _as_grammar(form: Mapping[str, Any]) -> Mapping[str, Any]:
    tag = json.dumps({"type": "structural_tag", "format": form})
    written: str = load_core().Grammar.from_structural_tag(tag).to_string()
    ours = _with_patterns_counted(written.replace(THEIR_CLASS, OUR_CLASS))
    return form if ours == written else {"type": "grammar", "grammar": ours}


def _with_patterns_counted(grammar: str) -> str:
    """The rule of such a pattern is for one character then, and is repeated where it stands."""
    counted = {
        name: made
        for name, pattern in _PATTERN.findall(grammar)
        if (made := _repetition(name, re.sub(r"\\(\W)", r"\1", pattern)))
    }
    if not counted:
        return grammar
    grammar = _USED.sub(lambda found: counted[found[1]][0] if found[1] in counted else found[0], grammar)
    return _PATTERN.sub(lambda found: counted[found[1]][1] if found[1] in counted else found[0], grammar)


def _repetition(name: str, pattern: str) -> tuple[str, str] | None:
    """What stands in the place of the rule, and its own rules. None: it stays as it is."""
    found = _LONG.fullmatch(pattern)
    if found is None or not (characters := json_class(found["piece"])):
        return None
    least, most, head = int(found["least"]), int(found["most"] or -1), found["head"]
    if not found["comma"]:
        most = least
    if max(least, most) < LONG or 0 <= most < least:
        return None
    rules = f"{name} ::= {characters}"
    counted = f"{name}{{{least}, {most}}}"
    if head:
        rules += f"\n{name}_head ::= Regex({json.dumps(f'^{head}$', ensure_ascii=False)}, json_string=true)"
        counted = f"{name}_head {counted}"
    return f'"\\"" {counted} "\\""', rules
