"""The Llama network on packed tokens: embedding, decoder layers, final norm, logits. Tensor in, tensor out.

Module names follow the checkpoint's, apart from the packed projections. Formulas: Touvron et al. 2023 (LLaMA),
Grattafiori et al. 2024 (Llama 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mstar.layers.attention import SelfAttention
from mstar.layers.embedding import OutputHead, TiedEmbedding, TokenEmbedding, select_rows
from mstar.layers.mlp import GatedMLP
from mstar.layers.norm import RMSNorm
from mstar.model.llama.config import LlamaConfig


class LlamaLayer(nn.Module):
    """One decoder layer. `x` is its normalized input, `residual` the stream that the layer adds to, in place; what it
    returns is the next layer's `x`, by `next_norm`."""

    def __init__(self, c: LlamaConfig, index: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(
            index,
            hidden_size=c.hidden_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
            attn_key="attn",
            pos_key="rope",
            dtype=dtype,
            device=device,
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, device=device)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, residual: Tensor, next_norm: RMSNorm) -> Tensor:
        x = self.self_attn(x, self.post_attention_layernorm.onto(residual))
        return self.mlp(x, next_norm.onto(residual))


class LlamaNetwork(nn.Module):
    """`forward` gives logits of chosen tokens. Build it on the meta device, load it, then `pack_weights`."""

    embed_tokens: TokenEmbedding | TiedEmbedding

    def __init__(self, c: LlamaConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        if c.tie_word_embeddings:
            self.embed_tokens = self.lm_head = TiedEmbedding(c.vocab_size, c.hidden_size, dtype=dtype, device=device)
        else:
            self.embed_tokens = TokenEmbedding(c.vocab_size, c.hidden_size, dtype=dtype, device=device)
            self.lm_head = OutputHead(c.hidden_size, c.vocab_size, dtype=dtype, device=device)
        layers = (LlamaLayer(c, index, dtype=dtype, device=device) for index in range(c.num_layers))
        self.layers = cast("Sequence[LlamaLayer]", nn.ModuleList(layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device)

    def forward(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Logits fp32 `[rows, vocab]` of the tokens at `last` int64 `[rows]`, for ids `tokens` int64 `[tokens]`."""
        return self.lm_head(select_rows(self.forward_hidden(tokens), last))

    def forward_hidden(self, tokens: Tensor) -> Tensor:
        """`[tokens, hidden]` after the final norm."""
        residual = self.embed_tokens.embed(tokens)  # [tokens, hidden]
        x = self.layers[0].input_layernorm(residual)
        for layer, next_norm in zip(self.layers, self._norms_after_layers(), strict=True):
            x = layer(x, residual, next_norm)
        return x

    def _norms_after_layers(self) -> list[RMSNorm]:
        return [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
