"""Nodes of the served composite model: those of the composite model, with a language model that takes its time."""

import time

from support.composite.declarations import LLM
from support.composite.submodules import build_submodule as build_composite

from mstar.engine.submodule import NodeSubmodule
from mstar.model.submodule_context import SubmoduleContext


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    node = build_composite(node_name, context)
    if node_name == LLM:
        forward = node.forward_batched

        def slow(walk, inputs):
            time.sleep(context.setup.config["forward_delay_s"])
            return forward(walk, inputs)

        node.forward_batched = slow
    return node
