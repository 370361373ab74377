"""Resource handles of a hybrid model for one sequence without an engine: what `SoloResources` has, and states."""

from typing import Any

import torch
from support.solo_resources import SoloResources
from torch import Tensor

from mstar.engine.layer_handles import GatedDeltaWeights
from mstar.engine.spec import LinearAttentionSpec, NodeResourceSpec, RecurrentStateSpec
from mstar.kernels import ops
from mstar.kernels.fused_norms import GatedNorm

SLOT = 2


class HybridResources(SoloResources):
    """The one sequence has slot 2 of four; the others are NaN, and so is its own until it has tokens."""

    def __init__(self, spec: NodeResourceSpec, cos: Tensor, sin: Tensor, capacity: int = 512) -> None:
        super().__init__(spec, cos, sin, capacity)
        kinds: dict[type, Any] = {type(resource): resource for resource in spec.resources}
        state: RecurrentStateSpec = kinds[RecurrentStateSpec]
        self.linear: LinearAttentionSpec = kinds[LinearAttentionSpec]
        self.blocks = {block.name: torch.full((state.num_layers, 4, *block.shape), torch.nan) for block in state.blocks}
        self.slots_of_rows = torch.tensor([SLOT], dtype=torch.int32)
        self.has_state = torch.zeros(1, dtype=torch.int32)

    def begin(self, num_tokens: int) -> None:
        self.has_state = torch.tensor([int(self.length > 0)], dtype=torch.int32)
        super().begin(num_tokens)

    def find(self, key: str, index: int) -> Any:
        assert key in self.keys, key
        return _Delta(self, index) if key == "delta" else super().find(key, index)


class _Delta:
    def __init__(self, owner: HybridResources, index: int) -> None:
        self.owner, self.index = owner, index

    def mix(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        out: Tensor | None = None,
        norm: GatedNorm | None = None,
    ) -> Tensor:
        o = self.owner
        return ops.gated_delta(
            qkv,
            b,
            a,
            weights.conv,
            weights.a_log,
            weights.dt_bias,
            o.blocks["conv"][self.index],
            o.blocks["delta"][self.index],
            o.slots_of_rows,
            o.has_state,
            o.q_starts,
            o.linear.num_key_heads,
            out,
            norm=norm,
        )
