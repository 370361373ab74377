"""The tensor half of the tiny Llama whose forwards take their time. Workers import it."""

import time

from mstar.engine.submodule import NodeSubmodule
from mstar.model.llama.submodules import build_submodule as build_llama
from mstar.model.submodule_context import SubmoduleContext


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
