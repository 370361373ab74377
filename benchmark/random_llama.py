"""A Llama in the shape of SmolLM2-135M with random weights, for measuring where no checkpoint can be fetched.

Not for talking to: `model: benchmark.random_llama:CARD` in a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mstar.engine.submodule import NodeSubmodule
from mstar.layers.linear import pack_weights
from mstar.model.base import ModelCard, ModelSetup
from mstar.model.llama.config import LlamaConfig
from mstar.model.llama.model import LlamaModel
from mstar.model.llama.network import LlamaNetwork
from mstar.model.llama.submodules import LlamaSubmodule
from mstar.model.submodule_context import SubmoduleContext

SHAPE: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


class RandomLlamaModel(LlamaModel):
    """The declarations of `SHAPE`, whatever the deployment's checkpoint."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(ModelSetup(SHAPE, tokenizer_dir=None, max_seq_len=setup.max_seq_len))


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    """Weights of a fixed seed, small enough that nothing overflows."""
    network = LlamaNetwork(LlamaConfig.from_mapping(SHAPE), dtype=context.dtype, device=context.device)
    draw_weights(network, context.device)
    pack_weights(network)
    return LlamaSubmodule(network)


def draw_weights(network: LlamaNetwork, device: torch.device) -> None:
    """On the device, in place, of a fixed seed."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in network.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


CARD = ModelCard(
    name="random_llama",
    model="benchmark.random_llama:RandomLlamaModel",
    submodules="benchmark.random_llama:build_submodule",
    description="SmolLM2's shape with random weights, for measuring",
)
