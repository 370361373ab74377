"""What is wrong with a deployment's values, in the project's words: one line per field. Pure functions, no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mstar.config.schema import DeploymentConfig

_WORDS = {
    "missing": "is missing",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "tuple_type": "must be a list",
    "dict_type": "must be keys and values",
    "model_type": "must be keys and values",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} or fewer entries",
    "value_error": "{error}",
}
"""What a field's value must be, by pydantic's type of error."""
_UNSHOWN = frozenset({"missing", "extra_forbidden", "value_error"})
"""Errors that are not about the value itself."""


def explain(error: ValidationError, name: str) -> str:
    """`name`: what the deployment is called. What a value could be instead is one line, however many there are."""
    complaints: dict[tuple[int | str, ...], list[Any]] = {}
    for problem in error.errors(include_url=False):
        complaints.setdefault(_field_path(problem["loc"]), []).append(problem)
    lines = [_line(path, found) for path, found in complaints.items() if not _has_deeper(path, complaints)]
    return f"{name}:\n" + "\n".join(f"  {line}" for line in lines)


def _line(path: tuple[int | str, ...], problems: list[Any]) -> str:
    where = ".".join(map(str, path))
    kind, value = problems[0]["type"], problems[0]["input"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key{_suggest(path)}"
    first, *others = dict.fromkeys(_said(problem) for problem in problems)
    text = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
    found = "" if kind in _UNSHOWN or isinstance(value, Mapping) else f" (found {value!r})"
    return f"{where}: {text}{found}" if where else text


def _said(problem: Any) -> str:
    words = _WORDS.get(problem["type"])
    return problem["msg"] if words is None else words.format_map(problem.get("ctx", {}))


def _has_deeper(path: tuple[int | str, ...], paths: Mapping[tuple[int | str, ...], object]) -> bool:
    """Whether another error got further into the same value: then it is of the branch that was meant."""
    return any(len(other) > len(path) and other[: len(path)] == path for other in paths)


def _field_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A location without the names of types that pydantic puts into it for the branches of a union."""
    path: list[int | str] = []
    section: Any = DeploymentConfig
    for step in location:
        if isinstance(step, int) or _is_model(section) or get_origin(section) is dict:
            path.append(step)
            section = _inside(section, step)
    return tuple(path)


def _suggest(path: tuple[int | str, ...]) -> str:
    section: Any = DeploymentConfig
    for step in path[:-1]:
        section = _inside(section, step)
    if not _is_model(section):
        return ""
    close = difflib.get_close_matches(str(path[-1]), section.model_fields, n=1)
    elsewhere = [found for found in _keys(DeploymentConfig) if found.endswith(f".{path[-1]}")]
    if likely := elsewhere or close:
        return f"; did you mean {' or '.join(map(repr, likely))}?"
    return f"; known keys: {', '.join(section.model_fields)}"


def _keys(section: type[BaseModel]) -> list[str]:
    """Of a section and of those in it, from the section on, with dots."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(name)
        if _is_model(field.annotation):
            keys += [f"{name}.{key}" for key in _keys(cast("type[BaseModel]", field.annotation))]
    return keys


def _inside(section: Any, step: int | str) -> Any:
    """The type of a section's field, of a mapping's values or of a list's entries; None where there is none."""
    if _is_model(section):
        field = section.model_fields.get(str(step))
        return field.annotation if field is not None else None
    arguments = get_args(section)
    return arguments[-1 if isinstance(step, str) else 0] if arguments else None


def _is_model(section: Any) -> bool:
    return isinstance(section, type) and issubclass(section, BaseModel)
