"""Linear attention by the gated delta rule. Names its resource by key and owns no state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.engine.layer_handles import FindLayer, GatedDeltaWeights, LinearAttentionHandle
from mstar.kernels.fused_norms import AddNorm
from mstar.layers.linear import Linear
from mstar.layers.norm import GatedRMSNorm


class GatedDeltaNet(nn.Module):
    """Queries, keys, values, gates, `b` and `a` in one product (rows in this order), the gated delta rule over the
    states of the linear attention resource `delta_key`, gated norm, output projection (Yang et al. 2024, "Gated Delta
    Networks").

    `layer_index` counts the layers that share the state.
    """

    _delta: LinearAttentionHandle
    weights: GatedDeltaWeights

    def __init__(
        self,
        layer_index: int,
        *,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        eps: float,
        delta_key: str,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.delta_key = delta_key
        channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
        width = num_value_heads * value_dim
        self.widths = [channels, width, num_value_heads, num_value_heads]  # queries to values, gates, b, a
        self.in_proj = Linear(hidden_size, sum(self.widths), dtype=dtype, device=device)
        self.conv_weight: nn.Parameter | None = _empty(channels, 1, conv_kernel, dtype=dtype, device=device)
        # They are exponents: what a narrow dtype would lose of them, every later token would feel.
        self.a_log: nn.Parameter | None = _empty(num_value_heads, dtype=torch.float32, device=device)
        self.dt_bias: nn.Parameter | None = _empty(num_value_heads, dtype=torch.float32, device=device)
        self.norm = GatedRMSNorm(value_dim, eps, dtype=dtype, device=device)
        self.out_proj = Linear(width, hidden_size, dtype=dtype, device=device)

    def pack(self) -> None:
        """Bring the loaded weights together and let go of the parameters."""
        if self.conv_weight is None or self.a_log is None or self.dt_bias is None:
            raise RuntimeError("the weights of a gated delta net are packed once")
        self.weights = GatedDeltaWeights(self.conv_weight.data.squeeze(1), self.a_log.data, self.dt_bias.data)
        self.conv_weight = self.a_log = self.dt_bias = None

    def bind_resources(self, find: FindLayer) -> None:
        self._delta = find(self.delta_key, self.layer_index)

    def forward(self, x: Tensor, then: AddNorm | None = None) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`. `then`: see `Linear.forward_then`."""
        qkv, gate, b, a = self.in_proj(x).split(self.widths, 1)
        mixed = self._delta.mix(qkv, b, a, self.weights, norm=self.norm.by(gate))
        return self.out_proj.forward_then(mixed, then)


def _empty(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
