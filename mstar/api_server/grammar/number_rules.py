"""Bounds and multiples of numbers, as the compiler of grammars takes them right. Pure.

It writes fractions with six decimals: a bound between two of those is moved inwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from mstar.api_server.grammar.schema_error import SchemaError

MAX_NUMBER = {"integer": 2**63 - 1, "number": 10**15}
MAX_MULTIPLES = 1024
"""What the compiler of grammars takes."""
_LOWER = {"minimum": False, "exclusiveMinimum": True}
_UPPER = {"maximum": False, "exclusiveMaximum": True}


def number_rules(kind: str, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`kind`: integer or number. Returns rules for it, or with few multiples their `enum`.

    Raises:
        SchemaError: they cannot be held to.
    """
    rules: dict[str, Any] = {}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if keyword not in schema:
            continue
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_NUMBER[kind]:
            raise SchemaError(f"{path}.{keyword}", f"it must be a number, of up to {MAX_NUMBER[kind]:g}")
        if keyword == "multipleOf" and (kind != "integer" or value != int(value) or value <= 0):
            raise SchemaError(f"{path}.multipleOf", "multipleOf can be enforced of integers, for whole numbers, only")
        if kind == "integer" and value != int(value):
            keyword, value = {
                "minimum": ("minimum", math.ceil(value)),
                "exclusiveMinimum": ("minimum", math.ceil(value)),
                "maximum": ("maximum", math.floor(value)),
                "exclusiveMaximum": ("maximum", math.floor(value)),
            }[keyword]
        elif kind == "number":
            value = _written(value, up=keyword in ("minimum", "exclusiveMinimum"))
        rules[keyword] = int(value) if value == int(value) else value
    if kind == "number":
        _check_that_some_are_left(rules, path)
    if "multipleOf" in rules:
        return _multiples(rules, path)
    return rules


def _step(value: float) -> float:
    """Between two numbers that are written near `value`: with six decimals, large ones without."""
    return 1e-6 if abs(value) < 1e9 else 1


def _written(value: float, *, up: bool) -> float:
    """The next number that can be written."""
    if _step(value) == 1:
        return math.ceil(value) if up else math.floor(value)
    exact = Decimal(value).quantize(Decimal("0.000001"), ROUND_CEILING if up else ROUND_FLOOR)
    nearest = round(value, 6)
    return value if nearest == value else float(exact)


def _check_that_some_are_left(rules: dict[str, Any], path: str) -> None:
    """Of the numbers between two bounds."""
    lows = [rules[key] + _step(rules[key]) * is_open for key, is_open in _LOWER.items() if key in rules]
    highs = [rules[key] - _step(rules[key]) * is_open for key, is_open in _UPPER.items() if key in rules]
    if lows and highs and max(lows) > min(highs) + 1e-7:
        raise SchemaError(path, "there is no number of six decimals between its bounds")


def _multiples(rules: dict[str, Any], path: str) -> dict[str, Any]:
    """`multipleOf` is held to by itself, and in a range of few."""
    factor, bounds = rules["multipleOf"], set(rules) - {"multipleOf"}
    if not bounds and factor <= MAX_MULTIPLES:
        return rules
    lows = [rules[key] + is_open for key, is_open in _LOWER.items() if key in rules]
    highs = [rules[key] - is_open for key, is_open in _UPPER.items() if key in rules]
    if lows and highs:
        first, last = -(-max(lows) // factor), min(highs) // factor
        if 0 <= last - first < MAX_MULTIPLES:
            return {"enum": [factor * index for index in range(first, last + 1)]}
    raise SchemaError(
        f"{path}.multipleOf",
        f"multipleOf can be enforced up to {MAX_MULTIPLES}, or in a range with as many multiples",
    )
