"""A two-layer attention model with random weights: as a node on the engine's contract, and as a plain torch function.

The function recomputes the whole sequence for every token and knows neither caches nor pages; the node is what tests of
the engine run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.cuda_graph_config import BatchedCudaGraphConfig, CudaGraphConfig
from mstar.engine.layer_handles import FindLayer
from mstar.engine.spec import AttentionSpec, NodeResourceSpec, PagedKVSpec, RotarySpec, SamplerSpec
from mstar.engine.step import AttentionStep, KVStep, PositionStep, Rows, SamplerStep, SubmoduleStep
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeOutputs, NodeSubmodule, RowColumns, StopDecision

NODE = "LLM"
VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 61, 24, 2, 4, 2, 8, 4
THETA = 100.0


def decoder_spec(page_size: int = PAGE) -> NodeResourceSpec:
    """Resources in an order in which nothing may depend on declaration order."""
    return NodeResourceSpec(
        NODE,
        (
            SamplerSpec("sampler", VOCAB),
            AttentionSpec("attn", kv_key="kv", num_heads=HEADS),
            RotarySpec("rope", kv_key="kv", rotary_dim=HEAD_DIM, theta=THETA),
            PagedKVSpec("kv", LAYERS, KV_HEADS, HEAD_DIM, page_size),
        ),
    )


class _Layer(nn.Module):
    def __init__(self, index: int, generator: torch.Generator) -> None:
        super().__init__()
        self.index = index
        self.qkv = _random(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator)
        self.out = _random(HEADS * HEAD_DIM, WIDTH, generator)

    def bind_resources(self, find: FindLayer) -> None:
        self.attention = find("attn", self.index)
        self.rotary = find("rope", self.index)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.attention.attend(x @ self.qkv, self.rotary) @ self.out)


class _Head(nn.Module):
    def bind_resources(self, find: FindLayer) -> None:
        self.sampler = find("sampler", 0)


class TinyDecoder(NodeSubmodule):
    """Walks `prefill` (the prompt, samples the first token) and `decode`. `poison_token`: a row whose last token is
    this one gets NaN logits. `fail` is raised by the next forward."""

    host_signals = frozenset({"token"})

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = _random(VOCAB, WIDTH, generator) * 3
        self.layers = nn.ModuleList(_Layer(index, generator) for index in range(LAYERS))
        self.lm_head = _random(WIDTH, VOCAB, generator) * 4
        self.head = _Head()
        self.poison_token: int | None = None
        self.fail: list[BaseException] = []
        self.batch_sizes: list[int] = []

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        num_rows = len(rows.handles)
        if graph_walk == "decode":
            return NodeBatch(np.ones(num_rows, np.int32), np.full(num_rows, -1, np.int32))
        missing = [p[length:] for p, length in zip(rows.prompts, rows.lengths, strict=True) if p is not None]
        return NodeBatch(rows.num_prompt - rows.lengths, np.concatenate(missing))

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        return SubmoduleStep(
            {"kv": KVStep(), "attn": AttentionStep(), "rope": PositionStep(), "sampler": SamplerStep(kept=kept)}, rows
        )

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        assert inputs.tokens is not None and inputs.last is not None
        self.batch_sizes.append(inputs.last.shape[0])
        if self.fail:
            raise self.fail.pop()
        x = self.embed(inputs)
        for layer in self.layers:
            x = layer(x)
        hidden = x[inputs.last]
        logits = self.logits_of(hidden)
        if self.poison_token is not None:
            logits[inputs.tokens[inputs.last] == self.poison_token] = float("nan")
        return {"token": self.head.sampler.sample(logits), "hidden": hidden}

    def embed(self, inputs: EngineInputs) -> Tensor:
        return self.embedding[inputs.tokens]

    def logits_of(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head

    def check_stop(self, graph_walk: str, rows: RowColumns, host_rows: Mapping[str, np.ndarray]) -> list[StopDecision]:
        stopped = np.flatnonzero(self.head.sampler.stopped(rows.handles, host_rows["token"]))
        return [StopDecision(stopped, "decode", finish=True)] if stopped.size else []

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        if graph_walk == "decode":
            return ChunkingPolicy(batch_with=("prefill",))
        return ChunkingPolicy(chunked=True, keep_final_chunk_samples=True, reuse_prefix=True, recomputable=True)

    def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
        return (BatchedCudaGraphConfig("decode"),)

    def reference_logits(self, ids: Sequence[int]) -> Tensor:
        """fp32 [len(ids), vocab], from the whole sequence at once."""
        x = self.embedding[torch.tensor(list(ids))]
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            q, k, v = (x @ layer.qkv).split((HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), -1)
            q = _rotated(q.view(len(ids), HEADS, HEAD_DIM))
            k = _rotated(k.view(len(ids), KV_HEADS, HEAD_DIM)).repeat_interleave(HEADS // KV_HEADS, 1)
            v = v.view(len(ids), KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
            future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            x = x + torch.tanh(attended @ layer.out)
        return x @ self.lm_head

    def reference_greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Argmax continuation of `prompt`."""
        ids = [int(token) for token in prompt]
        for _ in range(num_tokens):
            ids.append(int(self.reference_logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator) / rows**0.5


def _rotated(x: Tensor) -> Tensor:
    """Rotate-half rotary embedding of `[tokens, heads, head_dim]` at positions 0, 1, ..."""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[0])[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
