"""Linear attention backends: who computes the gated delta rule over the rows' states, and how one is chosen.

A backend is stateless; its method runs on the executor, on tensors that the linear attention resource hands in. Adding
one: implement `LinearAttentionBackend`, put it into `BACKENDS` and into a preference list.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mstar.engine.layer_handles import GatedDeltaWeights
from mstar.kernels import ops, reference_gated_delta

log = logging.getLogger(__name__)


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
    """A step's rows as the device sees them: `slots` and `has_state` int32 [rows], `q_starts` int32 [rows + 1]."""

    slots: Tensor
    has_state: Tensor
    q_starts: Tensor


class LayerStates(NamedTuple):
    """One layer's states: `conv [slots, conv_kernel - 1, channels]` in the dtype of caches, `delta fp32 [slots,
    num_value_heads, key_dim, value_dim]`."""

    conv: Tensor
    delta: Tensor


class LinearAttentionBackend(Protocol):
    """See the module docstring."""

    name: str
    capturable: bool
    """Launches depend on the bucket only."""

    def why_unavailable(self, need: LinearAttentionNeed) -> str | None:
        """None: it can serve `need`; otherwise the reason, for the log and the error."""
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


class GatedDeltaKernels:
    """The operation of `mstar.kernels.ops`: compiled on a CPU where that is possible, plain torch otherwise."""

    name = "cpu"
    capturable = True

    def why_unavailable(self, need: LinearAttentionNeed) -> str | None:
        return None if need.device_type == "cpu" else f"runs on a CPU, not on {need.device_type}"

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
        )


BACKENDS: dict[str, LinearAttentionBackend] = {b.name: b for b in (GatedDeltaKernels(), TorchReference())}
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "torch_ref"), "cuda": ("torch_ref",)}
"""By device type, best first."""


def choose_backend(key: str, need: LinearAttentionNeed, wanted: str | None) -> LinearAttentionBackend:
    """The deployment's choice, or the first of the platform's list that can serve `need`. Logs the choice.

    Raises:
        ValueError: an unknown name, a choice that cannot serve, or nothing that can; says why.
    """
    if wanted is not None and wanted not in BACKENDS:
        raise ValueError(f"resources.{key}.backend: {wanted!r} is unknown (known: {', '.join(sorted(BACKENDS))})")
    names = (wanted,) if wanted is not None else PREFERENCE.get(need.device_type, ("torch_ref",))
    refusals: list[str] = []
    for name in names:
        reason = BACKENDS[name].why_unavailable(need)
        if reason is None:
            log.info("linear attention %s: backend %s", key, name)
            return BACKENDS[name]
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"resources.{key}: no linear attention backend can serve {need}: {'; '.join(refusals)}")
