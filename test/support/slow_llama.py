"""A tiny Llama whose forwards take as long as its checkpoint's configuration says, for tests of processes and time.

Only forwards that run as they are written wait, so deployments of it set `capture.enabled: false`.

`forward_delay_s`: added to every forward. `stall_tokens`, `stall_s`: a step with so many tokens takes so long.
"""

import json
import time
from pathlib import Path

from support.checkpoints import tiny_llama, write_directory

from mstar.engine.submodule import NodeSubmodule
from mstar.model.base import ModelCard
from mstar.model.llama.submodules import build_submodule as build_llama
from mstar.model.submodule_context import SubmoduleContext

CARD = ModelCard(
    name="slow_llama",
    model="mstar.model.llama.model:LlamaModel",
    submodules="support.slow_llama:build_submodule",
    architectures=("LlamaForCausalLM",),
)
CARD_NAME = "support.slow_llama:CARD"


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    node = build_llama(node_name, context)
    config = context.setup.config
    forward = node.forward_batched

    def slow(walk, inputs):
        stalls = inputs.tokens is not None and len(inputs.tokens) == config.get("stall_tokens")
        time.sleep(config["stall_s"] if stalls else config.get("forward_delay_s", 0.0))
        return forward(walk, inputs)

    node.forward_batched = slow
    return node


def write_slow_llama(directory: Path, **facts: float) -> Path:
    """A checkpoint with a tokenizer and a chat template, and the delays of `facts` in its configuration. Larger weights
    than usual, so that greedy texts differ between prompts."""
    write_directory(directory, tiny_llama(initializer_range=0.5))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return directory
