"""`PackedLinear`: the weights of one linear map in the layout its kernel reads.

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

    ``data`` is ``W`` itself (``[out_features, in_features]``) when ``block`` is 0, else the kernel's layout.
    ``bias`` is fp32 or absent.
    """

    data: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int
    dtype: torch.dtype
    block: int
