"""`TritonKernels`: the operations of `mstar.kernels.ops` for CUDA tensors.

Runs on the thread of the forward. Must not read values on the host: what the compiled CPU kernels refuse as out of
range, these leave out.

A method answers `NotImplemented` for a layout or dtype it has no kernel for; the caller then uses the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.kernels.fused_norms import AddNorm
from mstar.kernels.packed import PackedLinear
from mstar.kernels.triton import (
    attention_decode,
    attention_prefill,
    draw,
    experts,
    gated_delta,
    greedy,
    logits,
    products,
    rows,
    tile_products,
)
from mstar.kernels.triton import rope as rotary


class TritonKernels:
    """One method per operation, with the signatures of `mstar.kernels.cpu.native.NativeKernels`."""

    def __init__(self) -> None:
        self.linear_attention = LinearAttentionKernels()
        self.experts = ExpertKernels()
        self.sampling = SamplingKernels()

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        dtype = out.dtype if out is not None else out_dtype or x.dtype
        if x.dim() != 2 or not packed.data.is_cuda or dtype not in (x.dtype, torch.float32):
            return NotImplemented
        if out is None:
            out = torch.empty((x.shape[0], packed.out_features), dtype=dtype, device=x.device)
        if x.shape[0] == 1 and products.row_product(x, packed.data, packed.bias, out) is not NotImplemented:
            return out
        if x.shape[0] <= tile_products.FEW_ROWS and _takes_tiles(x, packed) and out.stride(1) == 1:
            return tile_products.tile_product(x, packed.data, out)
        if dtype is x.dtype:
            bias = packed.bias
            return (
                torch.mm(x, packed.data.t(), out=out)
                if bias is None
                else torch.addmm(bias.to(dtype), x, packed.data.t(), out=out)
            )
        torch.mm(x, packed.data.t(), out_dtype=dtype, out=out)
        return out if packed.bias is None else out.add_(packed.bias)

    def gated_linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None) -> Tensor:
        if x.dim() != 2 or not packed.data.is_cuda:
            return NotImplemented
        if out is None:
            out = torch.empty((x.shape[0], packed.out_features // 2), dtype=x.dtype, device=x.device)
        if x.shape[0] == 1:
            return products.gated_row_product(x, packed.data, packed.bias, out)
        if not _takes_tiles(x, packed) or out.stride(1) != 1:
            return NotImplemented
        return tile_products.gated_tile_product(x, packed.data, out)

    def linear_add_norm(self, x: Tensor, packed: PackedLinear, then: AddNorm) -> Tensor:
        if x.dim() != 2 or not _takes_tiles(x, packed) or then.residual.stride(1) != 1 or then.weight.stride(0) != 1:
            return NotImplemented
        return rows.sum_and_norm(tile_products.product_parts(x, packed.data), *then)

    norm = staticmethod(rows.norm)
    silu_and_mul = staticmethod(rows.silu_and_mul)
    sigmoid_mul = staticmethod(rows.sigmoid_mul)
    greedy = staticmethod(greedy.greedy)
    rope = staticmethod(rotary.rope)
    write_kv = staticmethod(rotary.write_kv)
    rope_write_kv = staticmethod(rotary.rope_write_kv)

    def embedding(self, ids: Tensor, table: Tensor | PackedLinear, out: Tensor | None) -> Tensor:
        return rows.embedding(ids, table.data if isinstance(table, PackedLinear) else table, out)

    def paged_attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        kv_lens: Tensor,
        q_starts: Tensor,
        scale: float,
        causal: bool,
        out: Tensor,
    ) -> Tensor:
        """As many tokens as rows is taken for a decode step; both kernels are right either way."""
        attend = attention_decode.attend_tokens if q.shape[0] <= kv_lens.shape[0] else attention_prefill.attend_rows
        return attend(q, k_pages, v_pages, block_table, kv_lens, q_starts, scale, causal, out)


class ExpertKernels:
    """The operations of `mstar.kernels.experts`."""

    moe_mlp = staticmethod(experts.moe_mlp)


class SamplingKernels:
    """From logits to tokens."""

    largest_tokens = staticmethod(greedy.largest_tokens)
    mask_and_penalize = staticmethod(logits.mask_and_penalize)
    add_biases = staticmethod(logits.add_biases)
    draw_tokens = staticmethod(draw.draw_tokens)
    log_probabilities = staticmethod(logits.log_probabilities)
    write_live = staticmethod(logits.write_live)


class LinearAttentionKernels:
    """The operations of `mstar.kernels.linear_attention`."""

    gated_rms_norm = staticmethod(rows.gated_rms_norm)
    gated_delta = staticmethod(gated_delta.gated_delta)


def _takes_tiles(x: Tensor, packed: PackedLinear) -> bool:
    is_bf16 = x.dtype is packed.dtype is torch.bfloat16
    return is_bf16 and packed.bias is None and packed.data.is_cuda and tile_products.serves(x, packed.data)
