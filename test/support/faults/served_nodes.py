"""The tensor half of the tiny Llama whose forwards can be made to go wrong. Workers import it."""

from __future__ import annotations

import time
from pathlib import Path

from support.faults.declared import lose_the_device, raise_injected, run_out_of_memory
from support.faults.served import STUCK

from mstar.engine.submodule import EngineInputs, NodeOutputs, NodeSubmodule
from mstar.model.llama.submodules import build_submodule as build_llama
from mstar.model.submodule_context import SubmoduleContext

EFFECTS = {"raise": raise_injected, "out-of-memory": run_out_of_memory, "lost-device": lose_the_device}


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    node = build_llama(node_name, context)
    directory = Path(context.setup.config["faults_in"])
    forward = node.forward_batched

    def faulty(graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        hold_while_stuck(directory)
        for name, effect in EFFECTS.items():
            if (directory / name).exists():
                (directory / name).unlink()
                effect()
        return forward(graph_walk, inputs)

    node.forward_batched = faulty
    return node


def hold_while_stuck(directory: Path) -> None:
    while (directory / STUCK).exists():
        time.sleep(0.01)
