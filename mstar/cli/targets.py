"""What a command's target means: a file, a shipped configuration, or a checkpoint served with defaults."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from mstar.config.load import ConfigError, UnknownConfigError, config_from_mapping, load_config, shipped_configs
from mstar.config.schema import DeploymentConfig, ServerConfig
from mstar.model.loader.progress import DownloadProgress
from mstar.model.registry import CARDS, card_for_config, published_config


def config_for(target: str, overrides: Sequence[str], *, progress: DownloadProgress | None = None) -> DeploymentConfig:
    """A checkpoint is fetched, if need be: what it is decides which model serves it.

    Raises:
        ConfigError: with what could have been meant, or what is wrong with names and values.
        CheckpointError: there is no such checkpoint.
    """
    if _is_card(target):
        return config_from_mapping({"model": target}, target, overrides)
    if _is_checkpoint(target):
        return config_from_mapping({"model": _model_of(target, progress), "checkpoint": target}, target, overrides)
    try:
        return load_config(target, overrides)
    except UnknownConfigError:
        raise ConfigError(_unknown(target)) from None


def server_for(target: str, overrides: Sequence[str]) -> ServerConfig:
    """The HTTP side alone, without a look at any checkpoint.

    Raises:
        ConfigError: as `config_for`, for all that is wrong with names and values.
    """
    if _is_checkpoint(target):
        return config_from_mapping({"model": "", "checkpoint": target}, target, overrides).server
    return config_for(target, overrides).server


def _is_card(target: str) -> bool:
    """A model's name, or `package.module:CARD` of one outside this package. A shipped configuration of the same name is
    what is meant: it has the model and more."""
    module, colon, attribute = target.partition(":")
    outside = bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))
    return outside or (target not in shipped_configs() and any(card.name == target for card in CARDS))


def _is_checkpoint(target: str) -> bool:
    path = Path(target).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return False
    return path.is_dir() or path.suffix == ".gguf" or target.startswith("pypi:") or target.count("/") == 1


def _unknown(target: str) -> str:
    shipped, families = sorted(shipped_configs()), [card.name for card in CARDS]
    close = difflib.get_close_matches(target, [*shipped, *families], n=1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    return (
        f"there is no {target!r}{meant} What works: a shipped configuration ({', '.join(shipped)}), a model family "
        f"({', '.join(families)}), a YAML file, a checkpoint's folder or .gguf file, or its id on the hub (org/name)"
    )


def _model_of(target: str, progress: DownloadProgress | None) -> str:
    if not Path(target).expanduser().exists():
        for card in CARDS:
            if published_config(card, target) is not None:  # which it is, is known without a download
                return card.name
    # Imported here: only a bare checkpoint has to be looked into before its configuration exists.
    from mstar import envs
    from mstar.model.loader.checkpoint import resolve_checkpoint

    checkpoint = resolve_checkpoint(target, cache_dir=envs.CACHE_DIR.get(), progress=progress)
    try:
        return card_for_config(checkpoint.config()).name
    except ValueError as error:
        raise ConfigError(str(error)) from error
