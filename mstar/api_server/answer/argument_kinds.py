"""Which JSON types an argument of a tool may have, by the tool's schema, and what a model's text for it becomes. Pure;
the schema is the client's: whatever it holds is only looked at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

MAX_DEPTH = 16
MAX_BRANCHES = 256
"""Of a schema's unions and references: what lies beyond counts as anything."""
KINDS = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")
_WORDS = {
    "null": {"null": "null", "None": "null"},
    "boolean": {"true": "true", "True": "true", "false": "false", "False": "false"},
}
_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_encode = msgspec.json.encode


def argument_kinds(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types that the argument `key` of a function with the JSON schema `parameters` may have; all where it does
    not say."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        schema = properties[key]
    else:
        schema = parameters.get("additionalProperties")
    return _Kinds(parameters).of(schema, 0) or KINDS


class _Kinds:
    """Walks one schema, which `root` belongs to; visits a bounded number of its branches."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = MAX_BRANCHES

    def of(self, schema: Any, depth: int) -> frozenset[str]:
        """Empty when nothing is said."""
        self._num_left -= 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self._num_left < 0:
            return frozenset()
        declared = schema.get("type")
        names = {name for name in ([declared] if isinstance(declared, str) else _list(declared)) if name in KINDS}
        if names:
            return frozenset(names)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else _list(schema["enum"])
            return frozenset(
                _KIND_OF.get(type(value), "array" if isinstance(value, list) else "object") for value in values
            )
        if isinstance(reference := schema.get("$ref"), str):
            return self.of(self._target(reference), depth + 1)
        for union in ("anyOf", "oneOf"):
            if branches := _list(schema.get(union)):
                found = [self.of(branch, depth + 1) for branch in branches]
                return frozenset().union(*found) if all(found) else frozenset()
        for branch in _list(schema.get("allOf")):
            if found := self.of(branch, depth + 1):
                return found
        if "properties" in schema:
            return frozenset({"object"})
        return frozenset({"array"}) if "items" in schema else frozenset()

    def _target(self, reference: str) -> Any:
        """Of a reference inside the schema, `#/$defs/Name`."""
        found: Any = self._root
        if not reference.startswith("#"):
            return None
        for part in _parts(reference):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def json_value(text: str, kinds: frozenset[str]) -> str:
    """JSON of what a model wrote for an argument of `kinds`: the text itself where it is a value of such a kind, else
    the text as a string."""
    bare = text.strip()
    for kind in ("null", "boolean", "integer", "number", "object", "array"):
        if kind in kinds and (literal := _literal(bare, kind, may_be_text="string" in kinds)) is not None:
            return literal
    return _encode(text).decode()


def _literal(text: str, kind: str, *, may_be_text: bool) -> str | None:
    """JSON of `text` as a `kind`, None if it is none. `may_be_text`: only what is JSON as it stands counts."""
    if kind in _WORDS:
        literal = _WORDS[kind].get(text)
        return literal if literal == text or not may_be_text else None
    if kind == "integer":
        whole = _WHOLE.fullmatch(text)
        number = whole[1] if whole is not None and not may_be_text else text
        return number if _INTEGER.fullmatch(number) else None
    value = _parsed(text)
    wanted = {"number": (int, float), "object": dict, "array": list}[kind]
    return text if isinstance(value, wanted) and not isinstance(value, bool) else None


def _parsed(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(reference: str) -> Iterator[str]:
    for part in reference.removeprefix("#").split("/")[1 : MAX_DEPTH + 1]:
        yield part.replace("~1", "/").replace("~0", "~")
