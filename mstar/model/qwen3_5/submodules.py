"""Building the nodes of Qwen3.5 from a checkpoint. Workers only, on the loading thread."""

from __future__ import annotations

from mstar.engine.submodule import NodeSubmodule
from mstar.layers.linear import pack_weights
from mstar.model.loader.load_rules import ExpertRule, LoadRules, RenameRule, SplitRule, StackRule
from mstar.model.loader.module_loading import load_weights
from mstar.model.loader.weights import iter_weights
from mstar.model.qwen3_5.config import Qwen35Config
from mstar.model.qwen3_5.language_submodule import LanguageSubmodule
from mstar.model.qwen3_5.model import ENCODE, ENCODER_CACHE, VISION, is_of_language_model
from mstar.model.qwen3_5.network import Qwen35Network
from mstar.model.qwen3_5.vision_submodule import build_vision
from mstar.model.submodule_context import SubmoduleContext


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    """The node with its weights loaded and packed. Raises `CheckpointError` for a checkpoint that does not fit."""
    config = Qwen35Config.from_mapping(context.setup.config)
    if context.checkpoint is None:
        raise ValueError("qwen3_5 is built from a checkpoint, and the deployment names none")
    if node_name == VISION:
        budget = context.setup.max_step_patches
        return build_vision(context, config, cache_key=ENCODER_CACHE, loop=ENCODE, budget=budget)
    network = Qwen35Network(config, dtype=context.dtype, device="meta")
    load_weights(
        network,
        iter_weights(context.checkpoint, dtype=None, names=is_of_language_model),
        load_rules(config),
        device=context.device,
        progress=context.progress,
    )
    pack_weights(network)
    return LanguageSubmodule(network, config.media)


def load_rules(config: Qwen35Config) -> LoadRules:
    """How a checkpoint's names become the network's."""
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    splits = (
        SplitRule(f"self_attn.q_proj.{kind}", (f"self_attn.query.{kind}", f"self_attn.gate.{kind}"), config.num_heads)
        for kind in kinds
    )
    attention = ("self_attn.query", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate")
    delta = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    stacks = (
        *(
            StackRule(f"self_attn.qkv_gate_proj.{kind}", tuple(f"{each}.{kind}" for each in attention))
            for kind in kinds
        ),
        StackRule("linear_attn.in_proj.weight", tuple(f"linear_attn.{part}.weight" for part in delta)),
        StackRule("linear_attn.conv_weight", ("linear_attn.conv1d.weight",)),
        StackRule("linear_attn.a_log", ("linear_attn.A_log",)),
        StackRule("mlp.router.weight", ("mlp.gate.weight", "mlp.shared_expert_gate.weight")),
        *(
            StackRule(f"{mlp}.gate_up_proj.weight", (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"))
            for mlp in ("mlp", "mlp.shared_expert")
        ),
    )
    experts: tuple[ExpertRule, ...] = ()
    if config.experts is not None:
        count = config.experts.num_experts
        experts = (
            ExpertRule("mlp.experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight"), count),
            ExpertRule("mlp.experts.down_proj", ("down_proj.weight",), count),
        )
    return LoadRules(
        renames=(RenameRule("model.language_model.", ""), RenameRule("model.", "")),
        splits=tuple(splits),
        stacks=stacks,
        experts=experts,
        ignore=("lm_head.weight",) if config.tie_word_embeddings else (),
    )
