"""Patterns, formats and lengths of strings, as the compiler of grammars takes them right. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstar.api_server.grammar import patterns
from mstar.api_server.grammar.schema_error import SchemaError
from mstar.api_server.grammar.schema_form import count_of


def string_rules(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Rules for a string.

    Raises:
        SchemaError: they cannot be held to.
    """
    least, most = count_of(schema, "minLength", path), count_of(schema, "maxLength", path)
    pattern, form = schema.get("pattern"), schema.get("format")
    if form in patterns.UNKNOWN_FORMATS:
        raise SchemaError(f"{path}.format", f"the format {form} cannot be enforced")
    known = form in patterns.FORMATS or form in patterns.COMPILED_FORMATS
    if (pattern is not None) + known + bool(least or most is not None) > 1:
        raise SchemaError(path, "of pattern, format and a length only one can be enforced")
    if form in patterns.FORMATS:
        return {"pattern": patterns.compiled(patterns.FORMATS[form])}
    if known:
        return {"format": form}
    if pattern is not None:
        return {"pattern": compiled_pattern(pattern, f"{path}.pattern")}
    if least or most is not None:
        if most is not None and (least or 0) > most:
            raise SchemaError(f"{path}.maxLength", "it is less than minLength")
        if most == 0:
            return {"enum": [""]}
        bounds = {"minLength": least or None, "maxLength": most}
        return {keyword: bound for keyword, bound in bounds.items() if bound is not None}
    return {}


def compiled_pattern(pattern: str, path: str) -> str:
    """The pattern as the compiler reads it right. `path`: where it stands.

    Raises:
        SchemaError: it cannot be held to.
    """
    if why := patterns.why_not_matched(pattern):
        raise SchemaError(path, f"the pattern cannot be enforced: it {why}")
    return patterns.compiled(pattern)
