"""A Llama without a network: only `forward_batched` is replaced, everything around it is what serves.

Its forward sleeps, as a loop thread sees a device working, and draws each row's token from made logits through the
real sampler.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from mstar.engine.submodule import EngineInputs, NodeOutputs
from mstar.layers.sampling import Sampler
from mstar.model.base import ModelSetup
from mstar.model.llama.model import LlamaModel
from mstar.model.llama.submodules import LlamaSubmodule

VOCAB_SIZE = 64
TOKEN = 7
STOP_TOKEN = 11


def build_null_model(max_seq_len: int) -> LlamaModel:
    """The declarations of a one-layer Llama."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "eos_token_id": STOP_TOKEN,
    }
    return LlamaModel(ModelSetup(config, tokenizer_dir=None, max_seq_len=max_seq_len))


class NullSubmodule(LlamaSubmodule):
    """Every row draws `TOKEN`, and `STOP_TOKEN` in decode step `stop_iteration` (counted from 0).

    `device_s`: how long a forward takes; it sleeps, so it uses no core.
    """

    def __init__(self, device_s: float, stop_iteration: int) -> None:
        nn.Module.__init__(self)
        self.sampler = Sampler("sampler")
        self._device_s = device_s
        self._stop_iteration = stop_iteration
        logits = torch.zeros(2, VOCAB_SIZE)
        logits[0, TOKEN] = logits[1, STOP_TOKEN] = 100.0
        self._logits = logits

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        time.sleep(self._device_s)
        if graph_walk == "decode":
            stops = (inputs.iterations >= self._stop_iteration).long()
        else:
            stops = torch.zeros(inputs.num_rows, dtype=torch.int64)
        return {"token": self.sampler(self._logits[stops])}
