"""Schemas that hold together, and schemas that exclude each other. Pure; whatever cannot be told is not claimed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

_WITHOUT_EFFECT = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})

MAX_COMPARISONS = 100_000
"""Of schemas and values in one schema: a fifth of a second. Branches beyond count as ones that may overlap."""
MAX_DEPTH = 16
"""To which properties of branches are compared."""


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
        elif key == "type":
            both[key] = _common_types(_listed(both[key]), _listed(value))
        else:
            raise MergeError(f"{key} stands in several places")
    return both


class Comparisons:
    """Of the branches of one schema, up to a number of them. `resolve`: a schema without a reference at its top."""

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        self._resolve = resolve
        self._num_left = MAX_COMPARISONS

    def are_disjoint(self, schemas: Sequence[Any]) -> bool:
        """Whether no value can be valid by two of them. False: it may, for all that can be told."""
        schemas = [self._resolve(schema) for schema in schemas]
        return all(self._exclude_each_other(a, b, 0) for a, b in combinations(schemas, 2))

    def _exclude_each_other(self, a: Any, b: Any, depth: int) -> bool:
        self._num_left -= 1
        if self._num_left < 0 or depth > MAX_DEPTH:
            return False
        if a is False or b is False:
            return True
        kinds_a, kinds_b = _kinds(a), _kinds(b)
        if kinds_a is not None and kinds_b is not None and not kinds_a & kinds_b:
            return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None:
            self._num_left -= len(values_a) * len(values_b)
            return self._num_left >= 0 and all(value not in values_b for value in values_a)
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)) or kinds_a != {"object"} or kinds_b != {"object"}:
            return False
        shared = set(a.get("required", ())) & set(b.get("required", ()))
        return any(
            self._exclude_each_other(self._resolve(_property(a, name)), self._resolve(_property(b, name)), depth + 1)
            for name in shared
            if _property(a, name) is not None and _property(b, name) is not None
        )


def _closes(schema: Mapping[str, Any]) -> bool:
    return "additionalProperties" in schema and schema["additionalProperties"] is not True


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _listed(types: Any) -> list[str]:
    return types if isinstance(types, list) else [types]


def _common_types(first: list[str], second: list[str]) -> list[str]:
    """Raises `MergeError`: there are none."""
    common = [name for name in first if name in second or (name == "integer" and "number" in second)]
    common += [name for name in second if name == "integer" and "number" in first and name not in common]
    if not common:
        raise MergeError("types exclude each other")
    return common


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
