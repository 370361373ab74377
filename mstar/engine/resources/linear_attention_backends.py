"""Linear attention backends: who computes the gated delta rule over the rows' states. Which one a resource gets:
`linear_attention_choice`.

A backend keeps no request's state; its methods run on the executor, on tensors that the linear attention resource hands
in. Adding one: implement `LinearAttentionBackend`, and put it into the lists of `linear_attention_choice`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mstar.engine.layer_handles import GatedDeltaWeights
from mstar.engine.resources.backend_choice import why_elsewhere
from mstar.kernels import ops, reference, reference_gated_delta
from mstar.kernels.fused_norms import GatedNorm
from mstar.kernels.triton.limits import why_no_delta


@dataclass(frozen=True, slots=True)
class LinearAttentionNeed:
    """What a linear attention resource asks of its backend."""

    device_type: str
    dtype: torch.dtype
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int


class LinearAttentionMeta(NamedTuple):
    """A step's rows as the device sees them: `slots` and `has_state` int32 [rows], `q_starts` int32 [rows + 1].
    `single`: each has one token. `derived`: the backend's own, from `begin`."""

    slots: Tensor
    has_state: Tensor
    q_starts: Tensor
    single: bool
    derived: object = None


class LayerStates(NamedTuple):
    """One layer's states: `conv [slots, conv_kernel - 1, channels]` in the dtype of caches, `delta fp32 [slots,
    num_value_heads, key_dim, value_dim]`."""

    conv: Tensor
    delta: Tensor


class LinearAttentionBackend(Protocol):
    """See the module docstring."""

    name: str
    capturable: bool
    """Launches of steps of single tokens depend on the bucket only."""

    def why_unavailable(self, need: LinearAttentionNeed) -> str | None:
        """None: it can serve `need`; otherwise the reason, for the log and the error."""
        ...

    def begin(self, meta: LinearAttentionMeta, num_tokens: int) -> LinearAttentionMeta:
        """Once per forward before the first layer mixes `num_tokens`: what `mix` gets as `meta`."""
        ...

    def mix(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        states: LayerStates,
        key_heads: int,
        meta: LinearAttentionMeta,
        out: Tensor,
        norm: GatedNorm | None = None,
    ) -> None:
        """As `mstar.engine.layer_handles.LinearAttentionHandle.mix`; the states go on in place. A row whose slot is
        negative is padding: whatever it gets, it touches no state."""
        ...


class TorchReference:
    """The specification, in plain torch. Reads row borders on the host, so only a CPU or a debugging session should
    serve with it."""

    name = "torch_ref"
    capturable = False

    def why_unavailable(self, need: LinearAttentionNeed) -> str | None:
        return None

    def begin(self, meta: LinearAttentionMeta, num_tokens: int) -> LinearAttentionMeta:
        return meta

    def mix(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        states: LayerStates,
        key_heads: int,
        meta: LinearAttentionMeta,
        out: Tensor,
        norm: GatedNorm | None = None,
    ) -> None:
        reference_gated_delta.gated_delta(
            qkv,
            b,
            a,
            *weights,
            states.conv,
            states.delta,
            meta.slots,
            meta.has_state,
            meta.q_starts,
            key_heads,
            out,
        )
        if norm is not None:
            out.copy_(reference.gated_rms_norm(out, *norm))


class GatedDeltaKernels:
    """The operation of `mstar.kernels.ops`, compiled for the one type of device; on a CPU plain torch for what has no
    compiled kernel."""

    capturable = True

    def __init__(self, name: str, device_type: str) -> None:
        self.name = name
        self._device_type = device_type

    def why_unavailable(self, need: LinearAttentionNeed) -> str | None:
        if (elsewhere := why_elsewhere(self._device_type, need.device_type)) is not None or need.device_type == "cpu":
            return elsewhere
        return why_no_delta(need.key_dim, need.value_dim, need.conv_kernel)

    def begin(self, meta: LinearAttentionMeta, num_tokens: int) -> LinearAttentionMeta:
        return meta

    def mix(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        states: LayerStates,
        key_heads: int,
        meta: LinearAttentionMeta,
        out: Tensor,
        norm: GatedNorm | None = None,
    ) -> None:
        ops.gated_delta(
            qkv,
            b,
            a,
            *weights,
            states.conv,
            states.delta,
            meta.slots,
            meta.has_state,
            meta.q_starts,
            key_heads,
            out,
            max_tokens=1 if meta.single else None,
            norm=norm,
        )
