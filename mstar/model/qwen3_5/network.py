"""The Qwen3.5 language model on packed tokens. Tensor in, tensor out.

Layers mix tokens either by gated attention or by the gated delta rule, and each has a dense feed-forward part or one of
experts. Module names follow the checkpoint's, apart from packed projections. Formulas: `Qwen3_5ForCausalLM` and
`Qwen3_5MoeForCausalLM` of transformers 5.23.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.layers.decoder import Decoder
from mstar.layers.gated_attention import GatedAttention
from mstar.layers.gated_delta_net import GatedDeltaNet
from mstar.layers.mlp import GatedMLP
from mstar.layers.moe import SharedExpertMoE
from mstar.layers.norm import RMSNorm
from mstar.model.qwen3_5.config import FULL, Qwen35Config


class Qwen35Layer(nn.Module):
    """One layer (see `DecoderLayer`).

    `index` counts all layers, `place` those of the same type.
    """

    def __init__(
        self, c: Qwen35Config, index: int, place: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.mixes_by_attention = c.layer_types[index] == FULL
        if self.mixes_by_attention:
            self.self_attn = GatedAttention(
                place,
                hidden_size=c.hidden_size,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                eps=c.rms_norm_eps,
                bias=c.attention_bias,
                attn_key="attn",
                pos_key="rope",
                dtype=dtype,
                device=device,
            )
        else:
            self.linear_attn = GatedDeltaNet(
                place,
                hidden_size=c.hidden_size,
                num_key_heads=c.num_key_heads,
                num_value_heads=c.num_value_heads,
                key_dim=c.key_dim,
                value_dim=c.value_dim,
                conv_kernel=c.conv_kernel,
                eps=c.rms_norm_eps,
                delta_key="delta",
                dtype=dtype,
                device=device,
            )
        if c.experts is None:
            self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, dtype=dtype, device=device)
        else:
            self.mlp = SharedExpertMoE(
                c.hidden_size,
                num_experts=c.experts.num_experts,
                num_chosen=c.experts.num_chosen,
                expert_width=c.experts.expert_width,
                shared_width=c.experts.shared_width,
                dtype=dtype,
                device=device,
            )
        self.input_layernorm = _norm(c, dtype=dtype, device=device)
        self.post_attention_layernorm = _norm(c, dtype=dtype, device=device)

    def forward(self, x: Tensor, residual: Tensor, next_norm: RMSNorm) -> Tensor:
        mix = self.self_attn if self.mixes_by_attention else self.linear_attn
        x = mix(x, self.post_attention_layernorm.onto(residual))
        return self.mlp(x, next_norm.onto(residual))


class Qwen35Network(Decoder):
    """Build it on the meta device, load it, then `pack_weights`."""

    def __init__(self, c: Qwen35Config, *, dtype: torch.dtype, device: torch.device | str) -> None:
        layers = (
            Qwen35Layer(c, index, c.layer_types[:index].count(kind), dtype=dtype, device=device)
            for index, kind in enumerate(c.layer_types)
        )
        super().__init__(
            layers,
            _norm(c, dtype=dtype, device=device),
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            tied=c.tie_word_embeddings,
            dtype=dtype,
            device=device,
        )


def _norm(c: Qwen35Config, *, dtype: torch.dtype, device: torch.device | str) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.rms_norm_eps, zero_centered=True, dtype=dtype, device=device)
