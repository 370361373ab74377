"""JSON strings of a bounded length, as xgrammar counts them, without the control characters that it lets in. Pure.

Its own rule for such a string repeats one class of characters up to the closing quote, which its masks are ready for at
any length; that class has all control characters but line breaks, which JSON escapes. A pattern for the length would
have the right class, but each mask beyond some hundred characters is found token by token.

Runs where grammars are compiled: on a thread beside the worker's loop, and in the process of trials.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mstar.worker.grammars.native import load_core

LENGTHS = ("minLength", "maxLength")
THEIR_CLASS, OUR_CLASS = r"[^\"\\\r\n]", r"[^\"\\\0-\x1f]"
"""As xgrammar writes them. In what it writes of JSON the first is nothing else: a literal has no bare quote before a
backslash."""


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
    return _as_grammar(form) if any(keyword in json.dumps(form) for keyword in LENGTHS) else form


def _as_grammar(form: Mapping[str, Any]) -> Mapping[str, Any]:
    tag = json.dumps({"type": "structural_tag", "format": form})
    written: str = load_core().Grammar.from_structural_tag(tag).to_string()
    if THEIR_CLASS not in written:
        return form
    return {"type": "grammar", "grammar": written.replace(THEIR_CLASS, OUR_CLASS)}
