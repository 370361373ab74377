"""The tensor half of a Llama: the node `LLM` on the engine's contract, and its weights. Workers only.

Allocates no request state and picks no batch: it declares what a step touches and computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.cuda_graph_config import BatchedCudaGraphConfig, CudaGraphConfig, PackedCudaGraphConfig
from mstar.engine.step import (
    AttentionStep,
    KVStep,
    PositionStep,
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
from mstar.layers.linear import pack_weights
from mstar.layers.pooling import pool_last
from mstar.layers.sampling import Sampler
from mstar.model.llama.config import LlamaConfig
from mstar.model.llama.model import EMBED
from mstar.model.llama.network import LlamaNetwork
from mstar.model.loader.load_rules import LoadRules, RenameRule, StackRule
from mstar.model.loader.module_loading import load_weights
from mstar.model.loader.weights import iter_weights
from mstar.model.submodule_context import SubmoduleContext

TOUCHES: Mapping[str, ResourceStep] = {"kv": KVStep(), "attn": AttentionStep(), "rope": PositionStep()}
"""What every step touches."""


class LlamaSubmodule(NodeSubmodule):
    """Prefill and embed: all prompt tokens that the cache does not hold yet. Decode: the token sampled last."""

    host_signals = frozenset({"token"})

    def __init__(self, network: LlamaNetwork) -> None:
        super().__init__()
        self.network = network
        self.sampler = Sampler("sampler")

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        num_rows = len(rows.handles)
        if graph_walk == "decode":
            return NodeBatch(np.ones(num_rows, np.int32), np.full(num_rows, LIVE_TOKEN, np.int32))
        missing = [
            prompt[length:] for prompt, length in zip(rows.prompts, rows.lengths, strict=True) if prompt is not None
        ]
        return NodeBatch(rows.num_prompt - rows.lengths, np.concatenate(missing))

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        if graph_walk == EMBED:
            return SubmoduleStep(TOUCHES, rows)
        return SubmoduleStep({**TOUCHES, "sampler": SamplerStep(kept=kept)}, rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        assert inputs.tokens is not None and inputs.last is not None
        x = self.network.embed_tokens.embed(inputs.tokens)  # [tokens, hidden]
        if graph_walk == EMBED:
            return {"embedding": pool_last(self.network.forward_hidden(x), inputs.last)}
        return {"token": self.sampler(self.network(x, inputs.last))}

    def check_stop(self, graph_walk: str, rows: RowColumns, host_rows: Mapping[str, np.ndarray]) -> list[StopDecision]:
        if graph_walk == EMBED:
            return []
        stopped = self.sampler.stopped(rows.handles, host_rows["token"]).nonzero()[0]
        if stopped.size == 0:
            return []
        return [StopDecision(stopped, "decode" if graph_walk == "decode" else None, finish=True)]

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        if graph_walk == "decode":
            return ChunkingPolicy(batch_with=("prefill",))
        if graph_walk == EMBED:
            return ChunkingPolicy(chunked=True, reuse_prefix=True)
        return ChunkingPolicy(chunked=True, keep_final_chunk_samples=True, reuse_prefix=True, recomputable=True)

    def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
        return (BatchedCudaGraphConfig("decode"), PackedCudaGraphConfig("prefill"))


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    """The node with its weights loaded and packed. Raises `CheckpointError` for a checkpoint that does not fit."""
    config = LlamaConfig.from_mapping(context.setup.config)
    if context.checkpoint is None:
        raise ValueError("llama is built from a checkpoint, and the deployment names none")
    network = LlamaNetwork(config, dtype=context.dtype, device="meta")
    load_weights(
        network,
        iter_weights(context.checkpoint, dtype=context.dtype),
        load_rules(config),
        device=context.device,
        progress=context.progress,
    )
    pack_weights(network)
    return LlamaSubmodule(network)


def load_rules(config: LlamaConfig) -> LoadRules:
    """How a checkpoint's names become the network's."""
    stacks = [
        StackRule(
            "self_attn.qkv_proj.weight",
            ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ),
        StackRule("mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ]
    if config.attention_bias:
        stacks.append(
            StackRule(
                "self_attn.qkv_proj.bias", ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
            )
        )
    if config.mlp_bias:
        stacks.append(StackRule("mlp.gate_up_proj.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias")))
    ignore = ["*.rotary_emb.inv_freq"]
    if config.tie_word_embeddings:
        ignore.append("lm_head.weight")
    return LoadRules(renames=(RenameRule("model.", ""),), stacks=tuple(stacks), ignore=tuple(ignore))
