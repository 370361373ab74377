"""The configuration table of `docs/serving.rst` has every key of the schema, with its default, and no other."""

import re
import types
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from support.repository import ROOT

from mstar.config.load import config_from_mapping
from mstar.config.schema import DeploymentConfig

PAGES = ("serving", "adding_models", "models", "quickstart")


def _documented() -> dict[str, str]:
    text = (ROOT / "docs" / "serving.rst").read_text()
    table = text[text.index("   * - key\n") :].split("\n\n", 1)[0]
    return dict(re.findall(r"\* - ``([^`]+)``\n {5}- (.+)\n", table))


def _sections(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Sections inside a field's type, with what stands between the names: nothing, or KEY for a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    elif get_origin(annotation) in (dict, tuple, types.UnionType):
        between = ".KEY" if get_origin(annotation) is dict else ""
        for argument in get_args(annotation):
            yield from ((between + inner, section) for inner, section in _sections(argument))


def _text(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ((), {}):
        return "none" if value is None else "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _schema(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    keys: dict[str, str] = {}
    for name, field in section.model_fields.items():
        inner = list(_sections(field.annotation))
        if not inner or not isinstance(field.default, BaseModel):
            keys[prefix + name] = _text(field.default)
        for between, nested in inner:
            keys |= _schema(nested, f"{prefix}{name}{between}.")
    return keys


def test_table_equals_the_schema():
    assert _documented() == _schema(DeploymentConfig)


def _examples() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / f"{page}.rst").read_text()
        for block in re.findall(r"^\.\. code-block:: yaml\n\n((?:   .*\n|\n)+)", text, re.MULTILINE):
            found += [(page, "\n".join(line[3:] for line in block.splitlines()))]
    return found


@pytest.mark.parametrize(("page", "text"), _examples())
def test_examples_are_valid_configurations(page: str, text: str):
    for part in text.split("# or exactly:"):
        config_from_mapping({"model": "llama", **yaml.safe_load(part)}, page)
