"""A sampler with logits handed in: a node whose forward returns what the test wants. `draw` runs one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from support.engine_rig import EngineRig, take
from support.tiny_decoder import NODE
from torch import Tensor, nn

from mstar.communication.messages import SamplingParams
from mstar.engine.execution import Step
from mstar.engine.layer_handles import FindLayer
from mstar.engine.resources.base import OpenConfig
from mstar.engine.spec import NodeResourceSpec, SamplerSpec
from mstar.engine.step import Rows, SamplerStep, SubmoduleStep
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeOutputs, NodeSubmodule, RowColumns


class _Head(nn.Module):
    def bind_resources(self, find: FindLayer) -> None:
        self.sampler = find("sampler", 0)


class GivenLogits(NodeSubmodule):
    """`logits` [rows, vocab] of the next forward; `kept` of the next step."""

    host_signals = frozenset({"token"})

    def __init__(self) -> None:
        super().__init__()
        self.head = _Head()
        self.logits = torch.zeros(0)
        self.kept: np.ndarray | None = None

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        return NodeBatch(np.zeros(len(rows.handles), np.int32), kept=self.kept)

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        return SubmoduleStep({"sampler": SamplerStep(kept=kept)}, rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {"token": self.head.sampler.sample(self.logits.clone())}


class SamplerRig:
    """`draw({handle: logits row})` gives each handle's token."""

    def __init__(self, vocab: int, *, text: bool = True, capacity: int = 32) -> None:
        self.node = GivenLogits()
        specs = (NodeResourceSpec(NODE, (SamplerSpec("sampler", vocab, text),)),)
        self.rig = EngineRig({NODE: self.node}, specs, max_rows=capacity, capacity=capacity)

    def open(self, handle: int, prompt: Sequence[int] = (), **params: object) -> None:
        sampling = SamplingParams(**{"max_tokens": 100, **params})  # type: ignore[arg-type]
        memory = self.rig.engine.memory
        memory.introduce(handle, OpenConfig(sampling, np.array(prompt, np.int32), 1000))
        try:
            memory.open(handle)
        except ValueError:
            memory.close(handle)
            raise

    def close(self, handle: int) -> None:
        self.rig.engine.memory.close(handle)

    def step(self, rows: Mapping[int, Tensor], kept: np.ndarray | None = None) -> Step:
        self.node.logits = torch.stack(list(rows.values()))
        self.node.kept = kept
        step = self.rig.arm(take("walk", list(rows)))
        self.rig.engine.submit(step)
        self.rig.engine.finish(step)
        if step.error is not None:
            raise step.error
        return step

    def draw(self, rows: Mapping[int, Tensor]) -> dict[int, int]:
        step = self.step(rows)
        assert not step.failed, step.failed
        return dict(zip(step.handles.tolist(), step.host("token").tolist(), strict=True))
