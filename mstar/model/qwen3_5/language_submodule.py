"""The language model's node on the engine's contract. Workers only.

Allocates no request state and picks no batch: it declares what a step touches and computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.cuda_graph_config import BatchedCudaGraphConfig, CudaGraphConfig, PackedCudaGraphConfig
from mstar.engine.step import (
    AttentionStep,
    KVStep,
    LinearAttentionStep,
    PositionStep,
    RecurrentStep,
    ResourceStep,
    Rows,
    SamplerStep,
    SubmoduleStep,
)
from mstar.engine.submodule import (
    LIVE_TOKEN,
    EngineInputs,
    NodeBatch,
    NodeOutputs,
    NodeSubmodule,
    RowColumns,
    StopDecision,
)
from mstar.layers.pooling import pool_last
from mstar.layers.sampling import Sampler
from mstar.model.qwen3_5.config import MediaTokens
from mstar.model.qwen3_5.model import EMBED
from mstar.model.qwen3_5.network import Qwen35Network

FEATURE = "feature"
CUT = 64
"""Where chunks of a prompt end. References compute the gated delta rule in blocks of so many tokens, and so do
accelerators: other cuts would give other last bits."""

TOUCHES: Mapping[str, ResourceStep] = {
    "kv": KVStep(),
    "attn": AttentionStep(),
    "rope": PositionStep(),
    "state": RecurrentStep(),
    "delta": LinearAttentionStep(),
}
"""What every step touches."""


class LanguageSubmodule(NodeSubmodule):
    """Prefill and embed: all prompt tokens that the cache does not hold yet. Decode: the token sampled last.

    `media`: a prompt's tokens of these ids stand for the row's features, in order, which take the place of their
    embeddings. None: there is no vision tower.
    """

    host_signals = frozenset({"token"})
    media: MediaTokens | None

    def __init__(self, network: Qwen35Network, media: MediaTokens | None) -> None:
        super().__init__()
        self.network = network
        self.sampler = Sampler("sampler")
        self.media = media
        self.token_columns = () if media is None else (FEATURE,)

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        num_rows = len(rows.handles)
        if graph_walk == "decode":
            return NodeBatch(np.ones(num_rows, np.int32), np.full(num_rows, LIVE_TOKEN, np.int32))
        pairs = zip(rows.prompts, rows.lengths, strict=True)
        given = [(prompt, length) for prompt, length in pairs if prompt is not None]
        missing = np.concatenate([prompt[length:] for prompt, length in given])
        columns = None
        if self.media is not None:
            columns = {FEATURE: np.concatenate([features_of(prompt, self.media)[length:] for prompt, length in given])}
        return NodeBatch(rows.num_prompt - rows.lengths, missing, token_columns=columns)

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        if graph_walk == EMBED:
            return SubmoduleStep(TOUCHES, rows)
        return SubmoduleStep({**TOUCHES, "sampler": SamplerStep(kept=kept)}, rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        assert inputs.tokens is not None and inputs.last is not None
        x = self.network.embed_tokens.embed(inputs.tokens)  # [tokens, hidden]
        features = features_of_rows(inputs)
        if features:
            x = put_features(x, inputs.token_columns[FEATURE], inputs.last, features)
        if graph_walk == EMBED:
            return {"embedding": pool_last(self.network.forward_hidden(x), inputs.last)}
        return {"token": self.sampler(self.network(x, inputs.last))}

    def check_stop(self, graph_walk: str, rows: RowColumns, host_rows: Mapping[str, np.ndarray]) -> list[StopDecision]:
        if graph_walk == EMBED:
            return []
        stopped = np.flatnonzero(self.sampler.stopped(rows.handles, host_rows["token"]))
        if stopped.size == 0:
            return []
        return [StopDecision(stopped, "decode" if graph_walk == "decode" else None, finish=True)]

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        if graph_walk == "decode":
            return ChunkingPolicy(batch_with=("prefill",))
        if graph_walk == EMBED:
            return ChunkingPolicy(chunked=True, align=CUT, reuse_prefix=True)
        if graph_walk != "prefill":
            return None
        return ChunkingPolicy(
            chunked=True, align=CUT, keep_final_chunk_samples=True, reuse_prefix=True, recomputable=True
        )

    def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
        return (BatchedCudaGraphConfig("decode"), PackedCudaGraphConfig("prefill"))


def features_of(prompt: np.ndarray, media: MediaTokens) -> np.ndarray:
    """int32 [tokens]: which of its media's features stands for each token of `prompt`, -1 for text."""
    stands = np.isin(prompt, (media.image, media.video))
    return np.where(stands, np.cumsum(stands, dtype=np.int32) - 1, np.int32(-1))


def features_of_rows(inputs: EngineInputs) -> Sequence[Tensor]:
    """The features `[media tokens, hidden]` of each row of a step; empty where no row has any."""
    if "features" in inputs.tensors:
        return inputs.tensors["features"].unbind()
    rows = inputs.ragged.get("features", ())
    return rows if any(row.numel() for row in rows) else ()


def put_features(x: Tensor, column: Tensor, last: Tensor, features: Sequence[Tensor]) -> Tensor:
    """`x [tokens, hidden]` with the features of media in place of the tokens that stand for them.

    `column` int64 [tokens]: the index among its row's features, negative for text. `last` int64 [rows]: each row's last
    token. `features[row] [media tokens, hidden]`, empty for a row without.
    """
    counts = torch.tensor([0, *(row.shape[0] for row in features)])
    firsts = counts.cumsum(0)[:-1].to(x.device, non_blocking=True)  # of each row's features among all
    row_of_token = torch.searchsorted(last, torch.arange(x.shape[0], device=x.device)).clamp_max(last.shape[0] - 1)
    table = torch.cat([row.to(x.dtype) for row in features if row.numel()])
    index = (firsts[row_of_token] + column).clamp(0, table.shape[0] - 1)
    return torch.where((column >= 0).unsqueeze(1), table[index], x)
