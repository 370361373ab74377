"""A tiny Llama behind a real server whose forwards can be made to go wrong while it runs, from the test's process.

The model looks for files in the directory `faults_in` of its checkpoint's configuration at each forward: `stuck` holds
it for as long as the file is there, `raise`, `out-of-memory` and `lost-device` strike once and take the file away.
Only forwards that run as they are written look, so deployments of it set `capture.enabled: false`. Every process
of a server imports this file, so it imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from mstar.model.base import ModelCard

CARD = ModelCard(
    name="faulty_llama",
    model="mstar.model.llama.model:LlamaModel",
    submodules="support.faults.served_nodes:build_submodule",
    architectures=("LlamaForCausalLM",),
)
CARD_NAME = "support.faults.served:CARD"
STUCK = "stuck"


def write_faulty_llama(directory: Path, faults_in: Path) -> Path:
    """A checkpoint with a tokenizer; larger weights than usual, so that greedy texts differ between prompts."""
    from support.checkpoints import tiny_llama, write_directory

    faults_in.mkdir()
    write_directory(directory, tiny_llama(initializer_range=0.5))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"faults_in": str(faults_in)}))
    return directory
