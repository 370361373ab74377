"""A random Qwen3.5 that reads given texts token by token, as if it drew them, and whose logits are kept on the way.

For one request at a time whose steps are launched, not replayed. `model: benchmark.forced_texts:CARD` (or `:TINY`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmark import random_qwen3_5
from mstar.engine.submodule import NodeSubmodule
from mstar.layers.sampling import Sampler
from mstar.model.base import ModelCard
from mstar.model.qwen3_5.language_submodule import LanguageSubmodule
from mstar.model.submodule_context import SubmoduleContext


class ForcedText(Sampler):
    """`text`: the tokens to draw, in their order; without one the model draws its own. `logits`: fp32 `[vocab]` of each
    token drawn, as the model computed them."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.begin()

    def begin(self, text: Sequence[int] | None = None) -> None:
        """Before each request."""
        self.text = text
        self.logits: list[Tensor] = []

    def forward(self, logits: Tensor) -> Tensor:
        place = len(self.logits)
        self.logits.append(logits[0].float())
        if self.text is None or place >= len(self.text):
            return super().forward(logits)
        forced = torch.zeros_like(logits)
        forced[:, self.text[place]] = 1
        return super().forward(forced)


built: list[ForcedText] = []
"""Of the models of this process, the newest last."""


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    return _forced(random_qwen3_5.build_submodule(node_name, context))


def build_tiny(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    return _forced(random_qwen3_5.build_tiny(node_name, context))


def _forced(node: NodeSubmodule) -> NodeSubmodule:
    assert isinstance(node, LanguageSubmodule)
    forced = node.sampler = ForcedText(node.sampler.key)
    built.append(forced)
    return node


CARD = ModelCard(
    name="forced_qwen3_5",
    model="benchmark.random_qwen3_5:RandomQwen35Model",
    submodules="benchmark.forced_texts:build_submodule",
    description="Qwen3.5-0.8B's shape with random weights, reading given texts",
)
TINY = ModelCard(
    name="forced_qwen3_5_tiny",
    model="benchmark.random_qwen3_5:TinyQwen35Model",
    submodules="benchmark.forced_texts:build_tiny",
    description="Qwen3.5 in a tiny shape with random weights, reading given texts",
)
