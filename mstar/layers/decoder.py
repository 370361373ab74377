"""A decoder around its layers: token embedding, one residual stream, final norm, logits. Called by forwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from mstar.layers.embedding import OutputHead, TiedEmbedding, TokenEmbedding, select_rows
from mstar.layers.norm import RMSNorm


class DecoderLayer(Protocol):
    """What a layer of a decoder is. `x [tokens, hidden]` is its normalized input, `residual` the stream that it adds
    to, in place; what it returns is the next layer's `x`, by `next_norm`."""

    input_layernorm: RMSNorm

    def __call__(self, x: Tensor, residual: Tensor, next_norm: RMSNorm) -> Tensor: ...


class Decoder(nn.Module):
    """Over packed tokens. `norm` is the final one; with `tied` one table embeds tokens and scores them."""

    embed_tokens: TokenEmbedding | TiedEmbedding

    def __init__(
        self,
        layers: Iterable[nn.Module],
        norm: RMSNorm,
        *,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        if tied:
            self.embed_tokens = self.lm_head = TiedEmbedding(vocab_size, hidden_size, dtype=dtype, device=device)
        else:
            self.embed_tokens = TokenEmbedding(vocab_size, hidden_size, dtype=dtype, device=device)
            self.lm_head = OutputHead(hidden_size, vocab_size, dtype=dtype, device=device)
        self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(layers))
        self.norm = norm

    def forward(self, embeddings: Tensor, last: Tensor) -> Tensor:
        """Logits fp32 `[rows, vocab]` of the tokens at `last` int64 `[rows]`, for `embeddings [tokens, hidden]` of
        `embed_tokens` (overwritten)."""
        return self.lm_head(select_rows(self.forward_hidden(embeddings), last))

    def forward_hidden(self, embeddings: Tensor) -> Tensor:
        """`[tokens, hidden]` after the final norm; `embeddings` are overwritten."""
        residual = embeddings
        x = self.layers[0].input_layernorm(residual)
        for layer, next_norm in zip(self.layers, self._norms_after_layers(), strict=True):
            x = layer(x, residual, next_norm)
        return x

    def _norms_after_layers(self) -> list[RMSNorm]:
        return [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
