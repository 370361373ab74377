"""Log-probabilities of drawn tokens and of the most likely ones, from the raw logits. Pure tensor functions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mstar.engine.execution import StepLogprobs
from mstar.engine.resources.token_choice import largest

LOWEST = -9999.0
"""What stands for minus infinity: JSON has no infinities."""


def log_probabilities(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """fp32 `[n, 1 + 2 * num_top]`: logprob of `tokens` int64 `[n]`, ids and logprobs of the `num_top` most likely.

    Log-softmax of `logits` `[n, vocab]` in fp32; equal logits by rising id. Ids are exact in fp32 up to 2**24.
    """
    wide = logits.float()
    total = wide.logsumexp(-1, keepdim=True)
    own = wide.gather(1, tokens[:, None]) - total
    columns = [own.clamp_(min=LOWEST)]
    if num_top:
        values, ids = largest(wide, min(num_top, wide.shape[1]))
        columns += [ids.float(), (values - total).clamp_(min=LOWEST)]
    return torch.cat(columns, -1)


def unpack(rows: np.ndarray, num_top: np.ndarray, columns: np.ndarray) -> StepLogprobs:
    """The host side: `columns` fp32 `[step rows, 1 + 2 * widest]`, of which `rows` were asked for."""
    widest = (columns.shape[1] - 1) // 2
    index = np.full(columns.shape[0], -1, np.int64)
    index[rows] = np.arange(rows.size)
    asked = columns[rows]
    return StepLogprobs(index, num_top, asked[:, 0], asked[:, 1 : 1 + widest].astype(np.int32), asked[:, 1 + widest :])
