"""The language model of Qwen3.5-0.8B's shape, random weights drawn on the device: for measuring without a checkpoint.

Not for talking to: `model: benchmark.random_qwen3_5:CARD` in a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from mstar.engine.submodule import NodeSubmodule
from mstar.layers.linear import pack_weights
from mstar.model.base import ModelCard, ModelSetup
from mstar.model.qwen3_5.checkpoint_sizes import SIZES
from mstar.model.qwen3_5.config import Qwen35Config
from mstar.model.qwen3_5.language_submodule import LanguageSubmodule
from mstar.model.qwen3_5.model import Qwen35Model
from mstar.model.qwen3_5.network import Qwen35Network
from mstar.model.submodule_context import SubmoduleContext

SHAPE: Mapping[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"], **SIZES["0.8b"].config()["text_config"]}


class RandomQwen35Model(Qwen35Model):
    """The declarations of `SHAPE`, whatever the deployment's checkpoint."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(ModelSetup(SHAPE, tokenizer_dir=None, max_seq_len=setup.max_seq_len))


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    """Weights of a fixed seed, drawn so that texts differ between prompts and nothing overflows."""
    config = Qwen35Config.from_mapping(SHAPE)
    network = Qwen35Network(config, dtype=context.dtype, device=context.device)
    generator = torch.Generator(context.device).manual_seed(0)
    for name, parameter in network.named_parameters():
        if name.endswith("linear_attn.norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(("norm.weight", "layernorm.weight")):
            parameter.normal_(0.0, 0.1, generator=generator)  # scaled by one more than this
        elif name.endswith("a_log"):
            parameter.uniform_(-1.0, 2.0, generator=generator)
        elif name.endswith("dt_bias"):
            parameter.uniform_(-6.0, -2.0, generator=generator)
        elif name.endswith("conv_weight"):
            parameter.normal_(0.0, 0.5, generator=generator)
        else:
            parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    pack_weights(network)
    return LanguageSubmodule(network, None)


CARD = ModelCard(
    name="random_qwen3_5",
    model="benchmark.random_qwen3_5:RandomQwen35Model",
    submodules="benchmark.random_qwen3_5:build_submodule",
    description="Qwen3.5-0.8B's shape with random weights, for measuring",
)
