"""The form of a schema's keywords, whatever they ask for: checked, and read as plain values. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mstar.api_server.grammar.schema_error import SchemaError

KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
"""By what they say something about."""
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def check_form(schema: Mapping[str, Any], path: str) -> None:
    """Of the keywords that are looked at from outside the schema too.

    Raises:
        SchemaError: one of them is not what it must be, as from the functions below.
    """
    if not isinstance(schema.get("properties", {}), Mapping):
        raise SchemaError(f"{path}.properties", "it must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError(f"{path}.required", "it must be an array of names")
    if not isinstance(schema.get("enum", []), list):
        raise SchemaError(f"{path}.enum", "it must be an array")
    if not isinstance(schema.get("format", ""), str):
        raise SchemaError(f"{path}.format", "it must be a name")
    if not isinstance(schema.get("pattern", "."), str) or schema.get("pattern") == "":
        raise SchemaError(f"{path}.pattern", "it must be a regular expression")
    types_of(schema, path)


def types_of(schema: Mapping[str, Any], path: str) -> list[str] | None:
    """What `type` allows; None: it is not there."""
    declared = schema.get("type")
    if declared is None:
        return None
    names = declared if isinstance(declared, list) else [declared]
    if not names or any(name not in TYPES for name in names):
        raise SchemaError(f"{path}.type", f"it must be one or some of {', '.join(TYPES)}")
    return list(dict.fromkeys(names))


def kinds_of(value: Any) -> set[str]:
    """Types that a JSON value is of."""
    kind = _KIND_OF.get(type(value), "object")
    kinds = {kind}
    if kind == "integer":
        kinds.add("number")
    if kind == "number" and value == math.floor(value):
        kinds.add("integer")
    return kinds


def count_of(schema: Mapping[str, Any], keyword: str, path: str) -> int | None:
    """What a keyword such as `minItems` says; None: it is not there."""
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or not 0 <= value < 2**31:
        raise SchemaError(f"{path}.{keyword}", "it must be a whole number, 0 or more")
    return int(value)
