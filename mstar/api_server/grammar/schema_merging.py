"""Schemas that hold together, and schemas that exclude each other. Pure; whatever cannot be told is not claimed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

_WITHOUT_EFFECT = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})


class MergeError(ValueError):
    """Two schemas whose conjunction is no single schema of this kind."""


def merged(first: Mapping[str, Any], second: Any) -> dict[str, Any]:
    """One schema for what both allow.

    Raises:
        MergeError: it cannot be written as one.
    """
    if second is True:
        return dict(first)
    if not isinstance(second, Mapping):
        raise MergeError("a branch is no object")
    if "$ref" in second:
        raise MergeError("a branch is a reference beside other keywords")
    if "properties" in first and "properties" in second and _closes(first) + _closes(second):
        raise MergeError("additionalProperties beside properties elsewhere")
    if (_closes(first) and "properties" in second) or (_closes(second) and "properties" in first):
        raise MergeError("additionalProperties beside properties elsewhere")
    both = dict(first)
    for key, value in second.items():
        if key in _WITHOUT_EFFECT:
            continue
        if key not in both or both[key] == value:
            both[key] = value
        elif key == "required":
            both[key] = list(dict.fromkeys([*both[key], *value]))
        elif key == "properties":
            if any(name in both[key] and both[key][name] != schema for name, schema in value.items()):
                raise MergeError("a property is declared in several places")
            both[key] = {**both[key], **value}
        elif key == "type" and {both[key], value} == {"integer", "number"}:
            both[key] = "integer"
        else:
            raise MergeError(f"{key} stands in several places")
    return both


def are_disjoint(schemas: Sequence[Any], resolve: Callable[[Any, str], Any]) -> bool:
    """Whether no value can be valid by two of them. False: it may, for all that can be told."""
    return all(_exclude_each_other(a, b, resolve) for a, b in combinations(schemas, 2))


def _exclude_each_other(a: Any, b: Any, resolve: Callable[[Any, str], Any]) -> bool:
    if a is False or b is False:
        return True
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    if kinds_a is not None and kinds_b is not None and not kinds_a & kinds_b:
        return True
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return all(value not in values_b for value in values_a)
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)) or kinds_a != {"object"} or kinds_b != {"object"}:
        return False
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    return any(
        _exclude_each_other(resolve(_property(a, name), ""), resolve(_property(b, name), ""), resolve)
        for name in shared
        if _property(a, name) is not None and _property(b, name) is not None
    )


def _closes(schema: Mapping[str, Any]) -> bool:
    return "additionalProperties" in schema and schema["additionalProperties"] is not True


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _kinds(schema: Any) -> set[str] | None:
    """Types that it allows; numbers count for integers too. None: any, for all that is said."""
    if not isinstance(schema, Mapping):
        return None
    declared = schema.get("type")
    names = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else None
    return None if names is None else {"number" if name == "integer" else name for name in names}


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
