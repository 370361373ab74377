"""What a Llama declares: one partition of one node, a prefill walk and a decode loop, or a walk that embeds. No torch.

The walk plan is known up front, so the worker goes from prefill to decode alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar.engine.spec import AttentionSpec, NodeResourceSpec, PagedKVSpec, RotarySpec, SamplerSpec
from mstar.graph.base import (
    EMIT_TO_CLIENT,
    EMPTY_DESTINATION,
    GraphEdge,
    GraphNode,
    Loop,
    LoopLimit,
    Walks,
)
from mstar.model.base import Model, ModelSetup, PartitionPlan, PreparedPrompt, PromptRequest, WalkPlan
from mstar.model.llama.config import LlamaConfig
from mstar.model.text_prompt import EMBEDS, TextPrompts
from mstar.streaming.topology import Partition, PartitionTopology

NODE = "LLM"
PARTITION = "text"
DECODE_STEPS = "decode_steps"
EMBED = "embed"


class LlamaModel(Model):
    """Llama-family language models. The prompt's token ids reach the node as host columns, so prefill has no input."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        self.config = LlamaConfig.from_mapping(setup.config)
        self.prompts = TextPrompts(setup.tokenizer_dir, self.config.vocab_size)

    def walks(self) -> Walks:
        emit = GraphEdge(EMIT_TO_CLIENT, "token", output_modality="text")
        first = GraphEdge(EMPTY_DESTINATION, "token", persist=True)
        return {
            "prefill": GraphNode(NODE, (), (first, emit)),
            "decode": Loop(
                GraphNode(NODE, ("token",), (GraphEdge(NODE, "token"), emit)), LoopLimit(DECODE_STEPS), name="decode"
            ),
            EMBED: GraphNode(NODE, (), (GraphEdge(EMIT_TO_CLIENT, "embedding", output_modality="embedding"),)),
        }

    def partitions(self) -> PartitionTopology:
        return PartitionTopology((Partition(PARTITION, tuple(self.walks())),))

    def get_node_resources(self) -> Sequence[NodeResourceSpec]:
        c = self.config
        rope = RotarySpec("rope", kv_key="kv", rotary_dim=c.rotary_dim, theta=c.rope_theta, scaling=c.rope_scaling)
        return (
            NodeResourceSpec(
                NODE,
                (
                    PagedKVSpec("kv", c.num_layers, c.num_kv_heads, c.head_dim),
                    AttentionSpec("attn", kv_key="kv", num_heads=c.num_heads),
                    rope,
                    SamplerSpec("sampler", c.vocab_size),
                ),
            ),
        )

    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        return self.prompts.prepare(request)

    def plan_walks(self, prompt: PreparedPrompt, max_tokens: int) -> WalkPlan:
        """Prefill samples the first token, decode the others."""
        if prompt.step_metadata.get(EMBEDS):
            return WalkPlan((PartitionPlan(PARTITION, (EMBED,)),), {})
        return WalkPlan((PartitionPlan(PARTITION, ("prefill", "decode")),), {DECODE_STEPS: max_tokens - 1})

    def stop_token_ids(self) -> Sequence[int]:
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *self.prompts.eos_token_ids)))

    def vocab_size(self) -> int:
        return self.config.vocab_size

    def embedding_size(self) -> int:
        return self.config.hidden_size
