"""A tiny Llama whose forwards take as long as its checkpoint's configuration says, for tests of processes and time.

Only forwards that run as they are written wait, so deployments of it set `capture.enabled: false`. Every process of a
server imports this file, so it imports no torch.

`forward_delay_s`: added to every forward. `stall_tokens`, `stall_s`: a step with so many tokens takes so long.
"""

import json
from pathlib import Path

from mstar.model.base import ModelCard

CARD = ModelCard(
    name="slow_llama",
    model="mstar.model.llama.model:LlamaModel",
    submodules="support.slow_llama_nodes:build_submodule",
    architectures=("LlamaForCausalLM",),
)
CARD_NAME = "support.slow_llama:CARD"


def write_slow_llama(directory: Path, **facts: float) -> Path:
    """A checkpoint with a tokenizer and a chat template, and the delays of `facts` in its configuration. Larger weights
    than usual, so that greedy texts differ between prompts."""
    from support.checkpoints import tiny_llama, write_directory

    write_directory(directory, tiny_llama(initializer_range=0.5))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return directory
