"""`FlashInferAttention`: steps with prompts by FlashInfer's paged prefill kernels, planned on the host from host
integers; steps of single tokens, and captured ones, as `PagedKernels`, which need no plan.

Executor. Must not wait for the device, nor read a step's rows from it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.attention_backends import (
    AttentionBackend,
    AttentionMeta,
    AttentionNeed,
    HostRows,
    PagedKernels,
)
from mstar.engine.resources.paged_kv import LayerPages

HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20


class FlashInferAttention(PagedKernels):
    """Not bound to a resource: answers what it can serve."""

    def __init__(self) -> None:
        super().__init__("flashinfer", "cuda")

    def why_unavailable(self, need: AttentionNeed) -> str | None:
        if (reason := super().why_unavailable(need)) is not None:
            return reason
        if need.dtype not in (torch.bfloat16, torch.float16):
            return f"computes in 16 bits, not in {need.dtype}"
        if need.head_dim not in HEAD_DIMS:
            return f"heads of {', '.join(map(str, HEAD_DIMS))}, not of {need.head_dim}"
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed (the extra `cuda`)"
        return None

    def bind(self, need: AttentionNeed, device: torch.device) -> AttentionBackend:
        return _Bound(need, device)

    def plan(self, meta: AttentionMeta) -> None:
        raise RuntimeError("a backend is bound to a resource before it plans")


class _Bound(FlashInferAttention):
    """Of one resource. Two wrappers take turns: a plan is copied to the device from memory of the wrapper, which the
    next step's plan may not overwrite before the copy has been made."""

    def __init__(self, need: AttentionNeed, device: torch.device) -> None:
        # An optional dependency that takes seconds to import.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        super().__init__()
        self._need = need
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: list[Any] = [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for _ in range(2)]

    def plan(self, meta: AttentionMeta) -> None:
        if not meta.planned or meta.host.single:
            return
        self._wrappers.reverse()
        need = self._need
        starts, page_starts, pages, last_lens = plan_columns(meta.host, need.page_size)
        self._wrappers[0].plan(
            torch.from_numpy(starts),
            torch.from_numpy(page_starts),
            torch.from_numpy(pages),
            torch.from_numpy(last_lens),
            need.num_heads,
            need.num_kv_heads,
            need.head_dim,
            need.page_size,
            causal=meta.causal,
            sm_scale=meta.scale,
            q_data_type=need.dtype,
            kv_data_type=need.dtype,
        )

    def attend(self, q: Tensor, pages: LayerPages, meta: AttentionMeta, out: Tensor) -> None:
        if not meta.planned or meta.host.single:
            super().attend(q, pages, meta, out)
        else:
            self._wrappers[0].run(q, (pages.k, pages.v), out=out)


def plan_columns(rows: HostRows, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """int32: `q_starts`; where each row's pages begin, [rows + 1]; all pages, row after row; tokens in each row's last
    page."""
    counts = -(-rows.kv_lens // page_size)
    page_starts = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=page_starts[1:])
    used = np.arange(rows.block_table.shape[1]) < counts[:, None]
    last_lens = rows.kv_lens - (counts - 1) * page_size
    return (
        np.ascontiguousarray(rows.q_starts, np.int32),
        page_starts,
        np.ascontiguousarray(rows.block_table[used], np.int32),
        np.ascontiguousarray(last_lens, np.int32),
    )
