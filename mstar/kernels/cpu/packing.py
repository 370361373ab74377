"""The layout of weights that the compiled matrix kernels read. Runs once at load."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_words(weight: Tensor, vector_width: int) -> Tensor:
    """``[..., out, in]`` -> int32 ``[..., ceil(out / width), ceil(in / per_word), width]``: ``vector_width`` outputs
    side by side, a word of each at a time (see `mstar.kernels.packed.PackedLinear`)."""
    *leading, num_out, num_in = weight.shape
    per_word = 4 // weight.element_size()
    groups, words = -(-num_out // vector_width), -(-num_in // per_word)
    padded = weight.detach()
    if (groups * vector_width, words * per_word) != (num_out, num_in):
        padded = weight.new_zeros(*leading, groups * vector_width, words * per_word)
        padded[..., :num_out, :num_in] = weight
    whole = padded.contiguous().view(torch.int32).view(*leading, groups, vector_width, words)
    return whole.transpose(-1, -2).contiguous()
