"""Resource handles for one sequence without an engine: a cache, and rotary tables handed in. For tests of networks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mstar.engine.spec import AttentionSpec, NodeResourceSpec, PagedKVSpec
from mstar.kernels import ops
from mstar.kernels.fused_norms import HeadNorms


class SoloResources:
    """`begin(n)` says that the next forward computes `n` tokens after those seen so far."""

    def __init__(self, spec: NodeResourceSpec, cos: Tensor, sin: Tensor, capacity: int = 256) -> None:
        kinds: dict[type, Any] = {type(resource): resource for resource in spec.resources}
        kv, attention = kinds[PagedKVSpec], kinds[AttentionSpec]
        self.page_size = 16
        num_pages = capacity // self.page_size + 1
        shape = (kv.num_layers, num_pages, self.page_size, kv.num_kv_heads, kv.head_dim)
        self.k = torch.zeros(shape)
        self.v = torch.zeros(shape)
        # Pages in falling order, so that a mistaken identity of page and position would show.
        self.pages = torch.arange(num_pages - 1, 0, -1, dtype=torch.int32)
        self.scale = attention.scale or kv.head_dim**-0.5
        self.num_heads = attention.num_heads
        self.cos, self.sin = cos, sin
        self.length = 0
        self.positions = self.slots = self.q_starts = self.kv_lens = torch.empty(0, dtype=torch.int32)
        self.keys = {resource.key for resource in spec.resources}

    def begin(self, num_tokens: int) -> None:
        self.positions = torch.arange(self.length, self.length + num_tokens, dtype=torch.int32)
        self.length += num_tokens
        page = self.pages[(self.positions // self.page_size).long()]
        self.slots = page * self.page_size + self.positions % self.page_size
        self.q_starts = torch.tensor([0, num_tokens], dtype=torch.int32)
        self.kv_lens = torch.tensor([self.length], dtype=torch.int32)

    def bind(self, module: nn.Module) -> None:
        for layer in module.modules():
            bind = getattr(layer, "bind_resources", None)
            if bind is not None:
                bind(self.find)

    def find(self, key: str, index: int) -> Any:
        assert key in self.keys, key
        return {"attn": _Attention(self, index), "rope": _Rotary(self)}[key]


class _Rotary:
    def __init__(self, owner: SoloResources) -> None:
        self.owner = owner
        self.cos, self.sin = owner.cos, owner.sin

    @property
    def positions(self) -> Tensor:
        return self.owner.positions


class _Attention:
    def __init__(self, owner: SoloResources, index: int) -> None:
        self.owner, self.index = owner, index

    def attend(
        self, qkv: Tensor, rotary: _Rotary | None, out: Tensor | None = None, norms: HeadNorms | None = None
    ) -> Tensor:
        o = self.owner
        k_pages, v_pages = o.k[self.index], o.v[self.index]
        num_kv_heads, head_dim = k_pages.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        if norms is not None:
            ops.norm_heads(qkv, norms, o.num_heads, num_kv_heads, head_dim)
        if rotary is not None:
            ops.rope(qkv, o.positions, rotary.cos, rotary.sin, o.num_heads + num_kv_heads, head_dim)
        ops.write_kv(heads[:, o.num_heads : -num_kv_heads], heads[:, -num_kv_heads:], k_pages, v_pages, o.slots)
        queries = heads[:, : o.num_heads]
        result = ops.paged_attend(queries, k_pages, v_pages, o.pages[None], o.kv_lens, o.q_starts, o.scale)
        return result.flatten(1)


def split(total: int, parts: Sequence[int]) -> list[int]:
    """`parts`, then what is left of `total`."""
    rest = total - sum(parts)
    return [*parts, *([rest] if rest else [])]
