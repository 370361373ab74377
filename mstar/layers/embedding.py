"""Token embedding and output head, with weights of their own or shared. Called by forwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.kernels import ops
from mstar.layers.linear import Linear


class TokenEmbedding(nn.Module):
    """Rows of a table `[vocab, width]`."""

    def __init__(self, vocab_size: int, width: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width, dtype=dtype, device=device), requires_grad=False)

    def embed(self, ids: Tensor) -> Tensor:
        """int `[tokens]` → `[tokens, width]`, a tensor of its own."""
        return ops.embedding(ids, self.weight)


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]` for `x [tokens, width]` and int `index [rows]`, as one of the kernels' operations: a forward made of
    those alone can be recorded."""
    return ops.embedding(index, x)


class OutputHead(Linear):
    """Logits in fp32 whatever the weights are, so that greedy choice and sampling see every bit of the product."""

    def __init__(self, width: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(width, vocab_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, width]` → fp32 `[rows, vocab]`."""
        return ops.linear(x, self.packed, out_dtype=torch.float32)


class TiedEmbedding(OutputHead):
    """One table that embeds tokens and, as the output head, scores them. Kept once, in the head's layout."""

    def __init__(self, vocab_size: int, width: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(width, vocab_size, dtype=dtype, device=device)

    def embed(self, ids: Tensor) -> Tensor:
        """int `[tokens]` → `[tokens, width]`, a tensor of its own."""
        return ops.embedding(ids, self.packed)
