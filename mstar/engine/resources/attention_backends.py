"""Attention backends: who computes attention over a paged cache. Which one a resource gets: `attention_choice`.

A backend keeps no request's state; its methods run on the executor, on tensors that the attention resource hands in.
Adding one: implement `AttentionBackend`, and put it into the lists of `attention_choice`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mstar.engine.layer_handles import RotaryHandle
from mstar.engine.resources.backend_choice import why_elsewhere
from mstar.engine.resources.paged_kv import LayerPages
from mstar.kernels import ops, reference
from mstar.kernels.fused_norms import HeadNorms
from mstar.kernels.triton.limits import why_no_attention


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What an attention resource asks of its backend."""

    device_type: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int


class HostRows(NamedTuple):
    """A step's real rows as the host knows them, for libraries that plan there: `block_table`, `kv_lens`, `q_starts` as
    in `AttentionMeta`, numpy. `single`: every row has one token. Views of the step's staging slot."""

    block_table: np.ndarray
    kv_lens: np.ndarray
    q_starts: np.ndarray
    single: bool


class AttentionMeta(NamedTuple):
    """A step's rows as the device sees them. `block_table` int32 [rows, pages], `kv_lens` int32 [rows] (keys including
    the step's own), `q_starts` int32 [rows + 1], `slots` int32 [tokens]. `planned`: the backend may plan on the host;
    otherwise what it launches depends on their shapes alone, as where it is captured."""

    block_table: Tensor
    kv_lens: Tensor
    q_starts: Tensor
    slots: Tensor
    scale: float
    causal: bool
    write: bool
    host: HostRows
    planned: bool


class AttentionBackend(Protocol):
    """See the module docstring. `qkv` is packed `[tokens, (heads + 2 kv_heads) * head_dim]`; it may be
    columns of a wider projection."""

    name: str
    capturable: bool
    """Launches depend on the bucket only."""

    def why_unavailable(self, need: AttentionNeed) -> str | None:
        """None: it can serve `need`; otherwise the reason, for the log and the error."""
        ...

    def bind(self, need: AttentionNeed, device: torch.device) -> AttentionBackend:
        """The backend of one resource: one that keeps something between `plan` and `attend` is not shared."""
        ...

    def plan(self, meta: AttentionMeta) -> None:
        """Once per step before the first layer, on the executor: host-side planning of a kernel library."""
        ...

    def write_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        pages: LayerPages,
        rotary: RotaryHandle | None,
        meta: AttentionMeta,
        norms: HeadNorms | None = None,
    ) -> None:
        """Do `norms` to queries and keys and rotate them, in place (what is None is left out), and store keys and
        values at `meta.slots`."""
        ...

    def attend(self, q: Tensor, pages: LayerPages, meta: AttentionMeta, out: Tensor) -> None:
        """`q [tokens, heads, head_dim]` (a view) → `out`, same shape. Causal masks are bottom-right aligned."""
        ...


class TorchReference:
    """The specification: explicit mask, softmax in fp32, plain torch. Reads row borders on the host, so only a CPU or a
    debugging session should serve with it."""

    name = "torch_ref"
    capturable = False

    def why_unavailable(self, need: AttentionNeed) -> str | None:
        return None

    def bind(self, need: AttentionNeed, device: torch.device) -> AttentionBackend:
        return self

    def plan(self, meta: AttentionMeta) -> None:
        """Nothing to prepare."""

    def write_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        pages: LayerPages,
        rotary: RotaryHandle | None,
        meta: AttentionMeta,
        norms: HeadNorms | None = None,
    ) -> None:
        num_kv_heads, head_dim = pages.k.shape[2:]
        if norms is not None:
            reference.norm_heads(qkv, norms, num_heads, num_kv_heads, head_dim)
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
    """The operations of `mstar.kernels.ops`, compiled for the one type of device; on a CPU plain torch for what has no
    compiled kernel."""

    capturable = True

    def __init__(self, name: str, device_type: str) -> None:
        self.name = name
        self._device_type = device_type

    def why_unavailable(self, need: AttentionNeed) -> str | None:
        if (elsewhere := why_elsewhere(self._device_type, need.device_type)) is not None or need.device_type == "cpu":
            return elsewhere
        return why_no_attention(need.num_heads, need.num_kv_heads, need.head_dim)

    def bind(self, need: AttentionNeed, device: torch.device) -> AttentionBackend:
        return self

    def plan(self, meta: AttentionMeta) -> None:
        """Nothing to prepare."""

    def write_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        pages: LayerPages,
        rotary: RotaryHandle | None,
        meta: AttentionMeta,
        norms: HeadNorms | None = None,
    ) -> None:
        if rotary is not None:
            ops.rope_write_kv(
                qkv, rotary.positions, rotary.cos, rotary.sin, meta.slots, pages.k, pages.v, num_heads, rotary.axes,
                norms,
            )  # fmt: skip
            return
        if norms is not None:
            ops.norm_heads(qkv, norms, num_heads, *pages.k.shape[2:])
        k, v = _keys_and_values(qkv, *pages.k.shape[2:])
        ops.write_kv(k, v, pages.k, pages.v, meta.slots)

    def attend(self, q: Tensor, pages: LayerPages, meta: AttentionMeta, out: Tensor) -> None:
        ops.paged_attend(
            q, pages.k, pages.v, meta.block_table, meta.kv_lens, meta.q_starts, meta.scale, out=out, causal=meta.causal
        )


def _keys_and_values(qkv: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    return heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]
