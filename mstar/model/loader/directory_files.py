"""A checkpoint directory in Hugging Face layout: which weight files it has and what its JSON files say. No torch; any
process."""

import json
from pathlib import Path
from typing import Any

from mstar.model.loader.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model, in a fixed order: those that the index names, else `model.safetensors`, else
    every safetensors file of the directory itself (`consolidated*`, a second copy in another layout, left out).

    Raises:
        CheckpointError: there are none, or some that the index names are missing.
    """
    index = read_json(directory / INDEX)
    if index:
        files = [directory / name for name in sorted(set(index.get("weight_map", {}).values()))]
        if absent := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(f"{directory / INDEX} names files that are not there: {', '.join(absent)}")
    elif (directory / SINGLE).is_file():
        files = [directory / SINGLE]
    else:
        files = sorted(f for f in directory.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if not files:
        present = sorted(path.name for path in directory.iterdir())[:20]
        hint = " Give the path of the .gguf file itself." if any(name.endswith(".gguf") for name in present) else ""
        raise CheckpointError(
            f"{directory} has no safetensors files (it has: {', '.join(present) or 'nothing'}).{hint}"
        )
    return files


def directory_config(directory: Path) -> dict[str, Any]:
    """`config.json`. A flat `rope_parameters` (how transformers 5 writes it) is also given as `rope_theta` and
    `rope_scaling`, in the top level and in `text_config`, so that readers need to know one spelling.

    Raises:
        CheckpointError: there is no `config.json`, or it is damaged.
    """
    config = read_json(directory / "config.json")
    if not config:
        raise CheckpointError(f"{directory} has no config.json, so it is not a checkpoint in Hugging Face layout")
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            _spell_out_rope(section)
    return config


def _spell_out_rope(section: dict[str, Any]) -> None:
    parameters = section.get("rope_parameters")
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        return
    section["rope_theta"] = parameters["rope_theta"]
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default" and len(scaling) <= 1
    section["rope_scaling"] = None if plain else scaling


def as_id_list(value: int | list[int] | None) -> list[int]:
    """Token ids from a JSON value that may be one id, several or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
