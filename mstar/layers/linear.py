"""Linear layers whose weights are laid out once for the kernels of this process.

Built and packed on the loading thread, called by forwards. A layer holds plain parameters until `pack_weights`, then
only the packed form: on a CPU the weights are the memory, so both never live longer than one layer's packing.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mstar.kernels import ops
from mstar.kernels.fused_norms import AddNorm
from mstar.kernels.packed import PackedLinear


class Linear(nn.Module):
    """`y = x @ weight.T + bias`, `weight [out_features, in_features]`.

    Several maps of one input (queries, keys and values; gate and up) are one layer with their rows one after the other.
    """

    packed: PackedLinear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = _empty(out_features, in_features, dtype=dtype, device=device)
        self.bias: nn.Parameter | None = _empty(out_features, dtype=dtype, device=device) if bias else None

    def pack(self) -> None:
        """Lay the loaded weights out for the kernels and let go of the parameters."""
        if self.weight is None:
            raise RuntimeError("the weights of a linear layer are packed once")
        self.packed = ops.pack_linear(self.weight.data, None if self.bias is None else self.bias.data)
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        return ops.linear(x, self.packed)

    def forward_then(self, x: Tensor, then: AddNorm | None) -> Tensor:
        """`forward` of `x [tokens, in_features]`; with `then` the product is added to its residual, and the norm of
        that returned."""
        return self(x) if then is None else ops.linear_add_norm(x, self.packed, then)


@runtime_checkable
class HasWeightsToPack(Protocol):
    """A layer that lays its weights out for the kernels."""

    def pack(self) -> None: ...


def pack_weights(module: nn.Module) -> None:
    """Pack every layer below `module` that has something to pack; call it once, when all weights are loaded."""
    for layer in module.modules():
        if isinstance(layer, HasWeightsToPack):
            layer.pack()


def _empty(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
