"""Variants of the tiny decoder that declare more about chunks: outputs that grow, columns beside the token ids."""

from __future__ import annotations

import numpy as np
import torch
from support.tiny_decoder import VOCAB, WIDTH, TinyDecoder
from torch import Tensor

from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeInputs, NodeOutputs, RowColumns


class GatheringDecoder(TinyDecoder):
    """Its prefill gives the embedding of every prompt token, as `states` `[tokens, width]` by row."""

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        made = dict(super().forward_batched(graph_walk, inputs))
        if graph_walk == "prefill":
            assert inputs.tokens is not None and inputs.last is not None
            ends = [int(end) + 1 for end in inputs.last]
            made["states"] = list(self.embedding[inputs.tokens].split(np.diff([0, *ends]).tolist()))
        return made

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        if graph_walk == "prefill":
            return ChunkingPolicy(
                chunked=True, keep_final_chunk_samples=True, accumulate=frozenset({"states"}), recomputable=True
            )
        return super().get_chunking_policy(graph_walk)


class TintedDecoder(TinyDecoder):
    """Every third prompt token also adds an entry of a second table, by the token column `tint`; with `by_row` it
    answers row by row."""

    token_columns = ("tint", "unused")

    def __init__(self, seed: int = 0, *, by_row: bool = False) -> None:
        super().__init__(seed)
        self.tints = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(seed + 1))
        self.by_row = by_row
        self.seen: list[Tensor] = []

    @staticmethod
    def tint_of(positions: np.ndarray) -> np.ndarray:
        return np.where(positions % 3 == 0, positions, -1).astype(np.int32)

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch | None:
        if self.by_row:
            return None
        batch = super().prepare_batch(graph_walk, rows)
        if graph_walk == "decode":
            return batch
        tints = [self.tint_of(np.arange(begin, end)) for begin, end in zip(rows.lengths, rows.num_prompt, strict=True)]
        return batch._replace(token_columns={"tint": np.concatenate(tints)})

    def prepare_inputs(self, graph_walk: str, rows: RowColumns, index: int) -> NodeInputs | None:
        if graph_walk == "decode":
            return NodeInputs(1, np.array([-1], np.int32))
        prompt, length = rows.prompts[index], int(rows.lengths[index])
        assert prompt is not None
        columns = {"tint": self.tint_of(np.arange(length, prompt.size))}
        return NodeInputs(prompt.size - length, prompt[length:], token_columns=columns)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        assert inputs.tokens is not None
        assert (inputs.token_columns["unused"] == -1).all()
        tint = inputs.token_columns["tint"]
        assert tint.shape == inputs.tokens.shape and tint.dtype == torch.int64
        self.seen.append(tint.clone())
        return super().forward_batched(graph_walk, inputs)

    def embed(self, inputs: EngineInputs) -> Tensor:
        tint = inputs.token_columns["tint"]
        return super().embed(inputs) + torch.where(tint[:, None] < 0, 0.0, self.tints[tint.clamp(min=0)])

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        if graph_walk == "prefill":
            return ChunkingPolicy(chunked=True, keep_final_chunk_samples=True)
        return super().get_chunking_policy(graph_walk)
