"""What a language model makes of a whole text: one vector. Called by forwards."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mstar.layers.embedding import select_rows


def pool_last(hidden: Tensor, last: Tensor) -> Tensor:
    """fp32 `[rows, width]` of length 1: the direction of each row's last token, which has seen all others, for
    `hidden [tokens, width]` and the tokens at `last` int64 `[rows]`."""
    return functional.normalize(select_rows(hidden, last).float(), dim=-1)
