"""What a Qwen3.5 declares: a language model with two kinds of memory, and a vision tower as a node of its own. No
torch.

The walk plan is known up front, so the workers go from encoding to prefill to decode alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar.engine.spec import (
    AttentionSpec,
    EncoderCacheSpec,
    LinearAttentionSpec,
    NodeResourceSpec,
    PagedKVSpec,
    RecurrentStateSpec,
    RotarySpec,
    SamplerSpec,
    StateBlock,
)
from mstar.graph.base import (
    EMIT_TO_CLIENT,
    EMPTY_DESTINATION,
    GraphEdge,
    GraphNode,
    Loop,
    LoopLimit,
    Walks,
)
from mstar.model.base import (
    Markers,
    Model,
    ModelSetup,
    OutputFormat,
    PartitionPlan,
    PreparedPrompt,
    PromptRequest,
    WalkPlan,
)
from mstar.model.qwen3_5.config import Qwen35Config
from mstar.model.qwen3_5.encode_steps import EncodePlan
from mstar.model.qwen3_5.media_prompt import MediaPrompts, media_of
from mstar.model.qwen3_5.media_rules import MediaRules
from mstar.model.text_prompt import EMBEDS, TextPrompts
from mstar.streaming.topology import Partition, PartitionTopology

LANGUAGE = "LLM"
VISION = "Vision"
PARTITION = "text"
DECODE_STEPS = "decode_steps"
VISION_STEPS = "vision_steps"
ENCODE = "encode"
"""Both the walk that encodes media and its loop."""
EMBED = "embed"
ENCODER_CACHE = "encoded_media"
VISION_WEIGHTS = "model.visual."
"""How the names of the tower's tensors in a checkpoint begin."""
THINKING = Markers("<think>", "</think>")


class Qwen35Model(Model):
    """Qwen3.5 language models, with or without the vision tower, dense or with experts. The prompt's token ids reach
    the node as host columns; media come as features that the vision node made of them."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        self.config = Qwen35Config.from_mapping(setup.config)
        self.prompts = TextPrompts(setup.tokenizer_dir, self.config.vocab_size, THINKING)
        tokens = self.config.media
        self.media = (
            None
            if tokens is None
            else MediaPrompts(tokens, MediaRules.read(setup.tokenizer_dir), setup.max_seq_len, setup.max_media_pixels)
        )

    def walks(self) -> Walks:
        emit = GraphEdge(EMIT_TO_CLIENT, "token", output_modality="text")
        first = GraphEdge(EMPTY_DESTINATION, "token", persist=True)
        decode = GraphNode(LANGUAGE, ("token",), (GraphEdge(LANGUAGE, "token"), emit))
        walks: dict[str, GraphNode | Loop] = {
            "prefill": GraphNode(LANGUAGE, (), (first, emit)),
            "decode": Loop(decode, LoopLimit(DECODE_STEPS), name="decode"),
        }
        if self.config.vision is not None:
            has_features = GraphNode(LANGUAGE, ("features",), (first, emit), optional_inputs=frozenset({"features"}))
            walks = {ENCODE: self._encode_walk(), **walks, "prefill": has_features}
        embedding = GraphEdge(EMIT_TO_CLIENT, "embedding", output_modality="embedding")
        return {**walks, EMBED: GraphNode(LANGUAGE, (), (embedding,))}

    def _encode_walk(self) -> Loop:
        """The tower's blocks, some in each iteration; the features are whole after the last."""
        again = GraphEdge(VISION, "hidden")
        encode = GraphNode(
            VISION,
            ("pixels", "hidden"),
            (again, GraphEdge(EMPTY_DESTINATION, "features")),
            optional_inputs=frozenset({"hidden"}),
            enable_async_scheduling=False,  # its rows share what a step may cost, which is counted over all of them
        )
        keep = GraphEdge(EMPTY_DESTINATION, "features", persist=True)
        return Loop(encode, LoopLimit(VISION_STEPS), outputs=(keep,), name=ENCODE)

    def partitions(self) -> PartitionTopology:
        pixels = ("pixels",) if self.config.vision else ()
        return PartitionTopology((Partition(PARTITION, tuple(self.walks()), request_inputs=pixels),))

    def get_node_resources(self) -> Sequence[NodeResourceSpec]:
        vision = self.config.vision
        if vision is None:
            return (self._language_resources(),)
        cache = EncoderCacheSpec(ENCODER_CACHE, width=vision.out_hidden_size)
        return (NodeResourceSpec(VISION, (cache,)), self._language_resources())

    def _language_resources(self) -> NodeResourceSpec:
        c = self.config
        conv = StateBlock("conv", (c.conv_kernel - 1, c.conv_channels))
        delta = StateBlock("delta", (c.num_value_heads, c.key_dim, c.value_dim), wide=True)
        sections = None if c.vision is None else c.sections  # of a text token all positions are the same
        return NodeResourceSpec(
            LANGUAGE,
            (
                PagedKVSpec("kv", c.num_full_layers, c.num_kv_heads, c.head_dim),
                AttentionSpec("attn", kv_key="kv", num_heads=c.num_heads),
                RotarySpec("rope", kv_key="kv", rotary_dim=c.rotary_dim, theta=c.rope_theta, sections=sections),
                RecurrentStateSpec("state", kv_key="kv", num_layers=c.num_linear_layers, blocks=(conv, delta)),
                LinearAttentionSpec(
                    "delta",
                    state_key="state",
                    num_key_heads=c.num_key_heads,
                    num_value_heads=c.num_value_heads,
                    key_dim=c.key_dim,
                    value_dim=c.value_dim,
                    conv_kernel=c.conv_kernel,
                ),
                SamplerSpec("sampler", c.vocab_size),
            ),
        )

    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        sent = media_of(request.messages)
        if self.media is None:
            if sent:
                raise ValueError(f"this model reads text only, and the messages have {len(sent)} images or videos")
            return self.prompts.prepare(request)
        if not sent:
            prepared = self.prompts.prepare(request)
            assert prepared.token_ids is not None
            self.media.check_text(prepared.token_ids)
            return prepared
        text = self.prompts.text(request)
        prompt = self.media.expand(text, sent, lambda expanded: self.prompts.token_ids(request, expanded).tolist())
        opens_reasoning = self.prompts.opens_reasoning(request, text)
        return PreparedPrompt(
            prompt.token_ids, {"pixels": prompt.pixels}, media=prompt.media, opens_reasoning=opens_reasoning
        )

    def plan_walks(self, prompt: PreparedPrompt, max_tokens: int) -> WalkPlan:
        """Prefill samples the first token, decode the others."""
        if prompt.step_metadata.get(EMBEDS):
            return WalkPlan((PartitionPlan(PARTITION, (EMBED,)),), {})
        limits = {DECODE_STEPS: max_tokens - 1}
        if self.config.vision is None or not prompt.media:
            return WalkPlan((PartitionPlan(PARTITION, ("prefill", "decode")),), limits)
        grids = [span.grid for span in prompt.media]
        limits[VISION_STEPS] = EncodePlan(grids, self.config.vision, self.setup.max_step_patches).num_steps
        return WalkPlan((PartitionPlan(PARTITION, (ENCODE, "prefill", "decode")),), limits)

    def reads_weight(self, node: str, name: str) -> bool:
        return name.startswith(VISION_WEIGHTS) if node == VISION else is_of_language_model(name)

    def stop_token_ids(self) -> Sequence[int]:
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *self.prompts.eos_token_ids)))

    def vocab_size(self) -> int:
        return self.config.vocab_size

    def embedding_size(self) -> int:
        return self.config.hidden_size

    def output_format(self) -> OutputFormat:
        return OutputFormat(reasoning=THINKING, tool_calls="function_tags")

    def input_modalities(self) -> Sequence[str]:
        return ("text",) if self.config.vision is None else self.card.modalities_in


def is_of_language_model(name: str) -> bool:
    """Whether the network reads a checkpoint's tensor: not those of the vision tower, nor those that predict several
    tokens at once, which are published beside the model."""
    return not name.startswith((VISION_WEIGHTS, "mtp."))
