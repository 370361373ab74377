"""A tiny Llama behind a real server whose forwards can be made to go wrong while it runs, from the test's process.

The model looks for files in the directory `faults_in` of its checkpoint's configuration at each forward: `stuck` holds
it for as long as the file is there, `raise`, `out-of-memory` and `lost-device` strike once and take the file away.
Only forwards that run as they are written look, so deployments of it set `capture.enabled: false`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from support.checkpoints import tiny_llama, write_directory
from support.faults.declared import lose_the_device, raise_injected, run_out_of_memory

from mstar.engine.submodule import EngineInputs, NodeOutputs, NodeSubmodule
from mstar.model.base import ModelCard
from mstar.model.llama.submodules import build_submodule as build_llama
from mstar.model.submodule_context import SubmoduleContext

CARD = ModelCard(
    name="faulty_llama",
    model="mstar.model.llama.model:LlamaModel",
    submodules="support.faults.served:build_submodule",
    architectures=("LlamaForCausalLM",),
)
CARD_NAME = "support.faults.served:CARD"
STUCK = "stuck"
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


def write_faulty_llama(directory: Path, faults_in: Path) -> Path:
    """A checkpoint with a tokenizer; larger weights than usual, so that greedy texts differ between prompts."""
    faults_in.mkdir()
    write_directory(directory, tiny_llama(initializer_range=0.5))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"faults_in": str(faults_in)}))
    return directory
