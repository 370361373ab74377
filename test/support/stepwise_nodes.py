"""Nodes of the stepwise model: whole numbers in fp32, so that every output can be told by hand. Workers only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mstar.engine.submodule import EngineInputs, NodeOutputs, NodeSubmodule
from mstar.model.submodule_context import SubmoduleContext


def words_of(topic: int, thoughts: int, words: int) -> list[int]:
    """What `Thinker` and `Speaker` say about `topic`."""
    thought = 0
    for _ in range(thoughts):
        thought = 3 * thought + topic
    return [10 * (100 + thought) + index for index in range(words)]


class Thinker(NodeSubmodule):
    """`think`: thought ← 3 thought + topic, both 0 where absent. `speak`: idea = 100 + thought."""

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        thought = _stacked(inputs, "thought")
        if graph_walk == "speak":
            return {"idea": 100 + thought}
        return {"thought": 3 * thought + _stacked(inputs, "topic")}


class Speaker(NodeSubmodule):
    """word i = 10 idea + i."""

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {"word": 10 * _stacked(inputs, "idea") + inputs.iterations[:, None]}


class Singer(NodeSubmodule):
    """The sum of the words of one pass."""

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {"song": [words.sum(0) for words in _per_row(inputs, "word")]}


def _per_row(inputs: EngineInputs, name: str) -> Sequence[Tensor]:
    return inputs.ragged[name] if name in inputs.ragged else inputs.tensors[name].unbind(0)


def _stacked(inputs: EngineInputs, name: str) -> Tensor:
    """fp32 [rows, 1]; an absent value is 0."""
    num_rows = inputs.iterations.shape[0]
    if name not in inputs.tensors and name not in inputs.ragged:
        return torch.zeros(num_rows, 1)
    return torch.stack([row if row.numel() else torch.zeros(1) for row in _per_row(inputs, name)])


def build_submodule(node_name: str, context: SubmoduleContext | None = None) -> NodeSubmodule:
    return {"THINKER": Thinker, "SPEAKER": Speaker, "SINGER": Singer}[node_name]()
