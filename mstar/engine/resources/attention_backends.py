"""Attention backends: who computes attention over a paged cache, and how one is chosen.

A backend is stateless apart from scratch memory; its methods run on the executor, on tensors that the attention
resource hands in. Adding one: implement `AttentionBackend`, put it into `BACKENDS` and into a preference list.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mstar.engine.layer_handles import RotaryHandle
from mstar.engine.resources.paged_kv import LayerPages
from mstar.kernels import ops, reference

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What an attention resource asks of its backend."""

    device_type: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int


class AttentionCaps(NamedTuple):
    """`mixes_rows`: decode and prefill rows in one call. `capturable`: launches depend on the bucket only."""

    mixes_rows: bool
    capturable: bool


class AttentionMeta(NamedTuple):
    """A step's rows as the device sees them. `block_table` int32 [rows, pages], `kv_lens` int32 [rows] (keys including
    the step's own), `q_starts` int32 [rows + 1], `slots` int32 [tokens]."""

    block_table: Tensor
    kv_lens: Tensor
    q_starts: Tensor
    slots: Tensor
    scale: float
    causal: bool
    write: bool


class AttentionBackend(Protocol):
    """See the module docstring. `qkv` is packed `[tokens, (heads + 2 kv_heads) * head_dim]`; it may be
    columns of a wider projection."""

    name: str

    def why_unavailable(self, need: AttentionNeed) -> str | None:
        """None: it can serve `need`; otherwise the reason, for the log and the error."""
        ...

    def caps(self) -> AttentionCaps: ...

    def plan(self, meta: AttentionMeta) -> None:
        """Once per step before the first layer, on the executor: host-side planning of a kernel library."""
        ...

    def write_kv(
        self, qkv: Tensor, num_heads: int, pages: LayerPages, rotary: RotaryHandle | None, meta: AttentionMeta
    ) -> None:
        """Rotate queries and keys in place (unless `rotary` is None) and store keys and values at `meta.slots`."""
        ...

    def attend(self, q: Tensor, pages: LayerPages, meta: AttentionMeta, out: Tensor) -> None:
        """`q [tokens, heads, head_dim]` (a view) → `out`, same shape. Causal masks are bottom-right aligned."""
        ...


class TorchReference:
    """The specification: explicit mask, softmax in fp32, plain torch. Reads row borders on the host, so only a CPU or a
    debugging session should serve with it."""

    name = "torch_ref"

    def why_unavailable(self, need: AttentionNeed) -> str | None:
        return None

    def caps(self) -> AttentionCaps:
        return AttentionCaps(mixes_rows=True, capturable=False)

    def plan(self, meta: AttentionMeta) -> None:
        """Nothing to prepare."""

    def write_kv(
        self, qkv: Tensor, num_heads: int, pages: LayerPages, rotary: RotaryHandle | None, meta: AttentionMeta
    ) -> None:
        num_kv_heads, head_dim = pages.k.shape[2:]
        if rotary is not None:
            num_rotated = num_heads + num_kv_heads
            reference.rope(qkv, rotary.positions, rotary.cos, rotary.sin, num_rotated, head_dim, rotary.axes)
        k, v = _keys_and_values(qkv, num_kv_heads, head_dim)
        reference.write_kv(k, v, pages.k, pages.v, meta.slots)

    def attend(self, q: Tensor, pages: LayerPages, meta: AttentionMeta, out: Tensor) -> None:
        reference.paged_attend(
            q, pages.k, pages.v, meta.block_table, meta.kv_lens, meta.q_starts, meta.scale, meta.causal, out
        )


class PagedKernels:
    """The operations of `mstar.kernels.ops`: compiled on a CPU where that is possible, plain torch otherwise."""

    name = "cpu"

    def why_unavailable(self, need: AttentionNeed) -> str | None:
        return None if need.device_type == "cpu" else f"runs on a CPU, not on {need.device_type}"

    def caps(self) -> AttentionCaps:
        return AttentionCaps(mixes_rows=True, capturable=True)

    def plan(self, meta: AttentionMeta) -> None:
        """Nothing to prepare."""

    def write_kv(
        self, qkv: Tensor, num_heads: int, pages: LayerPages, rotary: RotaryHandle | None, meta: AttentionMeta
    ) -> None:
        if rotary is not None:
            ops.rope_write_kv(
                qkv, rotary.positions, rotary.cos, rotary.sin, meta.slots, pages.k, pages.v, num_heads, rotary.axes
            )
            return
        k, v = _keys_and_values(qkv, *pages.k.shape[2:])
        ops.write_kv(k, v, pages.k, pages.v, meta.slots)

    def attend(self, q: Tensor, pages: LayerPages, meta: AttentionMeta, out: Tensor) -> None:
        ops.paged_attend(
            q, pages.k, pages.v, meta.block_table, meta.kv_lens, meta.q_starts, meta.scale, out=out, causal=meta.causal
        )


BACKENDS: dict[str, AttentionBackend] = {backend.name: backend for backend in (PagedKernels(), TorchReference())}
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "torch_ref"), "cuda": ("torch_ref",)}
"""By device type, best first."""


def choose_backend(key: str, need: AttentionNeed, wanted: str | None) -> AttentionBackend:
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
            log.info("attention %s: backend %s%s", key, name, f" (not {'; '.join(refusals)})" if refusals else "")
            return BACKENDS[name]
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"resources.{key}: no attention backend can serve {need}: {'; '.join(refusals)}")


def _keys_and_values(qkv: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    return heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]
