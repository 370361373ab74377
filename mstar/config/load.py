"""Reads a deployment: defaults < model card < file < `--set a.b=c`. Every error names the key and, where one is near,
what was probably meant. No torch."""

from __future__ import annotations

import difflib
import importlib.resources
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mstar.config.explain import explain
from mstar.config.schema import DeploymentConfig


class ConfigError(ValueError):
    """A deployment that cannot be read; the message is for the person who wrote it."""


class UnknownConfigError(ConfigError):
    """There is neither such a file nor such a shipped configuration."""


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> DeploymentConfig:
    """`source`: a YAML file, the name of a configuration that ships with the package (`smollm2`), or
    `configs/<name>.yaml` of one.

    Raises:
        UnknownConfigError: no such file.
        ConfigError: one that cannot be read, not YAML, an unknown key, or a value out of range.
    """
    try:
        text = _find(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"cannot read {source}: {reason}") from None
    return config_from_text(text, str(source), overrides)


def config_from_text(text: str, name: str, overrides: Iterable[str] = ()) -> DeploymentConfig:
    """A deployment from YAML text; `name` is what errors call it."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {_reason(error, name)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected keys and values, found {type(values).__name__}")
    return config_from_mapping(values, name, overrides)


def config_from_mapping(values: Mapping[str, Any], name: str, overrides: Iterable[str] = ()) -> DeploymentConfig:
    """A deployment from plain values, with `a.b=c` overrides on top (the value is read as YAML)."""
    merged = _copy(values)
    for override in overrides:
        _override(merged, override)
    try:
        return DeploymentConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, name)) from error


def shipped_configs() -> dict[str, Path]:
    """Configurations inside the package (or the checkout), by name."""
    return {path.stem: path for folder in _shipped_folders() for path in sorted(folder.glob("*.yaml"))}


def _shipped_folders() -> list[Path]:
    package = Path(str(importlib.resources.files("mstar")))
    return [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]


def _find(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if path.is_file():
        return path
    shipped = shipped_configs()
    name = path.stem if path.parent.name in ("", "configs") else ""
    if name in shipped and path.suffix in ("", ".yaml"):
        return shipped[name]
    close = difflib.get_close_matches(path.stem, shipped, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f", which are {', '.join(sorted(shipped))}"
    raise UnknownConfigError(f"{str(source)!r} is neither a file nor a shipped configuration{hint}")


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _override(values: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, for example --set server.port=8080")
    *parents, last = path.strip().split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {text!r}: {parent!r} has no keys")
        values = inner
    try:
        values[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: the value is not valid YAML: {_reason(error, 'it')}") from error


def _reason(error: yaml.YAMLError, name: str) -> str:
    """What the parser says of a text, which it knows no name of."""
    return str(error).replace('"<unicode string>"', name)
