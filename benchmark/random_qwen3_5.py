"""The language model of Qwen3.5-0.8B's shape, random weights drawn on the device: for measuring without a checkpoint.
Beside it a tiny one of the same architecture, to try a harness with.

Not for talking to: `model: benchmark.random_qwen3_5:CARD` (or `:TINY`) in a configuration.
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


TINY_SHAPE: Mapping[str, Any] = SIZES["tiny-text"].config()


class RandomQwen35Model(Qwen35Model):
    """The declarations of its shape, whatever the deployment's checkpoint."""

    shape = SHAPE

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(ModelSetup(self.shape, tokenizer_dir=None, max_seq_len=setup.max_seq_len))


class TinyQwen35Model(RandomQwen35Model):
    """The same of `TINY_SHAPE`."""

    shape = TINY_SHAPE


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    """The node of `SHAPE`."""
    return _build(SHAPE, context)


def build_tiny(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    """The node of `TINY_SHAPE`."""
    return _build(TINY_SHAPE, context)


def _build(shape: Mapping[str, Any], context: SubmoduleContext) -> NodeSubmodule:
    """Weights of a fixed seed, drawn so that texts differ between prompts and nothing overflows; in bf16, so that they
    are the same whatever the deployment's dtype."""
    config = Qwen35Config.from_mapping(shape)
    network = Qwen35Network(config, dtype=context.dtype, device=context.device)
    generator = torch.Generator(context.device).manual_seed(0)
    for name, parameter in network.named_parameters():
        drawn = torch.ones_like(parameter, dtype=torch.bfloat16)
        if name.endswith("linear_attn.norm.weight"):
            pass  # ones
        elif name.endswith(("norm.weight", "layernorm.weight")):
            drawn.normal_(0.0, 0.1, generator=generator)  # scaled by one more than this
        elif name.endswith("a_log"):
            drawn.uniform_(-1.0, 2.0, generator=generator)
        elif name.endswith("dt_bias"):
            drawn.uniform_(-6.0, -2.0, generator=generator)
        elif name.endswith("conv_weight"):
            drawn.normal_(0.0, 0.5, generator=generator)
        else:
            drawn.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
        parameter.copy_(drawn)
    pack_weights(network)
    return LanguageSubmodule(network, None)


CARD = ModelCard(
    name="random_qwen3_5",
    model="benchmark.random_qwen3_5:RandomQwen35Model",
    submodules="benchmark.random_qwen3_5:build_submodule",
    description="Qwen3.5-0.8B's shape with random weights, for measuring",
)
TINY = ModelCard(
    name="random_qwen3_5_tiny",
    model="benchmark.random_qwen3_5:TinyQwen35Model",
    submodules="benchmark.random_qwen3_5:build_tiny",
    description="Qwen3.5 in a tiny shape with random weights, to try a harness with",
)
