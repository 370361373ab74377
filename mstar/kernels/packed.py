"""`PackedLinear`, `PackedExperts`: the weights of linear maps in the layout their kernels read.

Built once at load, on the loading thread; read by forwards. Must not keep the checkpoint's tensor alive when the
layout is another one: on a CPU the weights are the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights of ``y = x @ W.T + bias``. Made by `mstar.kernels.ops.pack_linear`, opaque to its users.

    ``data`` is ``W`` itself (``[out_features, in_features]``) when ``block`` is 0. Otherwise it is int32 words
    ``[ceil(out / block), ceil(in / per_word), block]``: a word holds one fp32 or two bf16 weights that follow each
    other along the inputs, and ``block`` outputs lie side by side. ``bias`` is fp32 or absent.
    """

    data: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int
    dtype: torch.dtype
    block: int

    def matrix(self) -> Tensor:
        """``W`` as ``[out_features, in_features]``; a copy when it is packed."""
        if not self.block:
            return self.data
        columns = self.data.transpose(1, 2).contiguous().view(self.dtype)  # [groups, block, padded in]
        return columns.flatten(0, 1)[: self.out_features, : self.in_features]


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Weights of one linear map per expert, without bias. Made by `mstar.kernels.ops.pack_experts`.

    ``data`` is ``[experts, ...]``, for each expert as `PackedLinear.data`.
    """

    data: Tensor
    num_experts: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    block: int

    def matrix(self, expert: int) -> Tensor:
        """``[out_features, in_features]`` of one expert; a copy when it is packed."""
        return PackedLinear(
            self.data[expert], None, self.out_features, self.in_features, self.dtype, self.block
        ).matrix()
