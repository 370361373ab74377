"""Declaring halves of the soak's models: a tiny Llama and the tiny composite model, both with small pages. No torch.

A card with faults serves the traffic, its twin without faults answers the same requests alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from support.composite.model import CARD as COMPOSITE
from support.composite.model import CompositeModel

from mstar.engine.spec import NodeResourceSpec, PagedKVSpec
from mstar.model.base import ModelCard, PreparedPrompt, PromptRequest
from mstar.model.llama.model import LlamaModel

PAGE = 16
"""Tokens of a page, in both models."""

LLAMA = ModelCard(
    name="soak_llama",
    model="soak.models:SoakLlama",
    submodules="soak.faulty_nodes:build_llama",
    architectures=("LlamaForCausalLM",),
)
LLAMA_ALONE = dataclasses.replace(
    LLAMA, name="soak_llama_alone", submodules="mstar.model.llama.submodules:build_submodule"
)
COMPOSITE_SERVED = dataclasses.replace(
    COMPOSITE,
    name="soak_composite",
    model="soak.models:SoakComposite",
    submodules="soak.faulty_nodes:build_composite",
)
COMPOSITE_ALONE = dataclasses.replace(
    COMPOSITE_SERVED, name="soak_composite_alone", submodules="support.composite.submodules:build_submodule"
)


class SoakLlama(LlamaModel):
    """Its cache has pages of `PAGE` tokens."""

    def get_node_resources(self) -> Sequence[NodeResourceSpec]:
        return [
            NodeResourceSpec(
                spec.node,
                tuple(
                    dataclasses.replace(resource, page_size=PAGE) if isinstance(resource, PagedKVSpec) else resource
                    for resource in spec.resources
                ),
            )
            for spec in super().get_node_resources()
        ]


class SoakComposite(CompositeModel):
    """What a client cannot send comes from the prompt's ids: prompts with the same first id have the same media, unless
    their last ids differ in parity: such prompts begin alike and must not share pages."""

    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        ids = request.token_ids
        if ids is None:
            words = (request.text or "").split()
            ids = tuple(int(word.removeprefix("t")) for word in words) or (1,)
        latent = (self._size("latent_rows"), self._size("latent_width"))
        inputs = {
            "media": media_of(ids, self._size("media_width")),
            "latent": np.cos(0.53 * np.arange(latent[0] * latent[1]) + len(ids)).reshape(latent).astype(np.float32),
        }
        return super().process_prompt(dataclasses.replace(request, token_ids=ids, text=None, inputs=inputs))


def media_of(ids: Sequence[int], width: int) -> np.ndarray:
    """fp32 `[2 n, width]`."""
    num_rows = 2 * (1 + ids[0] % 4)
    phase = ids[0] + 10 * (ids[-1] % 2)
    return np.sin(0.37 * np.arange(num_rows * width) + phase).reshape(num_rows, width).astype(np.float32)
