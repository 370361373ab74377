"""Calls into the compiled CPU kernels: checks shapes, packs arguments, raises what the kernel reports.

Runs on the thread of the forward; a call holds no lock of the interpreter. Must not allocate beyond missing outputs.
Every check guards memory: a kernel trusts the sizes it is given, and reports indices that it finds out of range.

A method answers `NotImplemented` for a layout or dtype it has no kernel for; the caller then uses the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mstar.kernels.cpu.experts import ExpertKernels
from mstar.kernels.cpu.layout import (
    check_pages,
    check_rope,
    is_index,
    is_token_columns,
    is_token_heads,
    is_wide,
    outer_inner,
)
from mstar.kernels.cpu.library import Library
from mstar.kernels.cpu.linear_attention import LinearAttentionKernels
from mstar.kernels.cpu.packing import packed_words
from mstar.kernels.packed import PackedLinear

_BF16, _FP32 = torch.bfloat16, torch.float32
_MAX_GATHERED = 512  # frequencies, as in rope.cpp


class NativeKernels:
    """The library's functions, one method each, with the signatures of `mstar.kernels.ops`; those of gated delta nets
    and of experts in a part of their own."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.vector_width = library.vector_width
        self.linear_attention = LinearAttentionKernels(library)
        self.experts = ExpertKernels(library)
        self._linear = library.call("mstar_linear", "12q")
        self._norm = library.call("mstar_norm", "10qd4q")
        self._silu_and_mul = library.call("mstar_silu_and_mul", "8q")
        self._sigmoid_mul = library.call("mstar_sigmoid_mul", "9q")
        self._rope_and_kv = library.call("mstar_rope_and_kv", "23q")
        self._embedding = library.call("mstar_embedding", "11q")
        self._greedy = library.call("mstar_greedy", "7q")
        self._paged_attend = library.call("mstar_paged_attend", "12qd7q")

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        num_out, num_in = weight.shape
        data = packed_words(weight, self.vector_width)
        wide_bias = None if bias is None else bias.detach().float().contiguous()
        return PackedLinear(data, wide_bias, num_out, num_in, weight.dtype, self.vector_width)

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        shape, dtype = x.shape, x.dtype
        if shape[-1] != packed.in_features or dtype is not packed.dtype:
            raise ValueError(f"linear wants [..., {packed.in_features}] {packed.dtype}, got {tuple(shape)} {dtype}")
        if out is None:
            out = torch.empty((*shape[:-1], packed.out_features), dtype=out_dtype or dtype)
        elif out.shape[:-1] != shape[:-1] or out.shape[-1] != packed.out_features:
            raise ValueError(f"linear out is {tuple(out.shape)}, not {(*shape[:-1], packed.out_features)}")
        if out.dtype is not dtype and not (out.dtype is _FP32 and dtype is _BF16):
            raise ValueError(f"linear over {dtype} cannot write {out.dtype}")
        rows = x if len(shape) == 2 and x.stride(1) == 1 else x.reshape(-1, packed.in_features).contiguous()
        to = out if len(shape) == 2 else out.view(-1, packed.out_features)
        (x_stride, _), (out_stride, inner) = rows.stride(), to.stride()
        if inner != 1:
            raise ValueError("linear out needs a contiguous last dimension")
        bias = packed.bias
        self._linear(
            torch.get_num_threads(), rows.shape[0], packed.in_features, packed.out_features, x_stride, out_stride,
            dtype is _BF16, out.dtype is _BF16, rows.data_ptr(), packed.data.data_ptr(),
            0 if bias is None else bias.data_ptr(), to.data_ptr(),
        )  # fmt: skip
        return out

    def norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None, zero_centered: bool
    ) -> Tensor:
        shape, dtype = x.shape, x.dtype
        width = shape[-1]
        if weight.dtype is not dtype or weight.shape != (width,) or not weight.is_contiguous():
            return NotImplemented
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        if out.shape != shape or out.dtype is not dtype:
            raise ValueError(f"rms_norm out is {tuple(out.shape)} {out.dtype}, not {tuple(shape)} {dtype}")
        x_layout, out_layout = outer_inner(x), outer_inner(out)
        if x_layout is None or out_layout is None:
            return NotImplemented
        outer, inner, x_outer, x_inner = x_layout
        if residual is not None:
            if residual.shape != shape or residual.dtype is not dtype:
                raise ValueError(f"residual is {tuple(residual.shape)} {residual.dtype}, not {tuple(shape)} {dtype}")
            if inner != 1 or not residual.is_contiguous():
                return NotImplemented
        self._norm(
            torch.get_num_threads(), outer, inner, width, x_outer, x_inner, out_layout[2], out_layout[3],
            zero_centered, dtype is _BF16, eps, x.data_ptr(), 0 if residual is None else residual.data_ptr(),
            weight.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def silu_and_mul(self, gate_up: Tensor, out: Tensor | None) -> Tensor:
        if gate_up.dim() != 2 or gate_up.stride(1) != 1:
            return NotImplemented
        tokens, width = gate_up.shape
        if width % 2:
            raise ValueError(f"silu_and_mul wants an even width, got {width}")
        if out is None:
            out = torch.empty((tokens, width // 2), dtype=gate_up.dtype)
        if out.shape != (tokens, width // 2) or out.dtype is not gate_up.dtype or out.stride(1) != 1:
            raise ValueError(f"silu_and_mul out is {tuple(out.shape)} {out.dtype}, not {(tokens, width // 2)}")
        self._silu_and_mul(
            torch.get_num_threads(), tokens, width // 2, gate_up.stride(0), out.stride(0), gate_up.dtype is _BF16,
            gate_up.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        if not (is_token_columns(x, x) and is_token_columns(gate, gate)):
            return NotImplemented
        if gate.dtype is not x.dtype and not (gate.dtype is _FP32 and gate.shape[1] == 1):
            return NotImplemented
        tokens, width = x.shape
        if gate.shape[0] != tokens or gate.shape[1] not in (1, width):
            raise ValueError(f"sigmoid_mul: x {tuple(x.shape)}, gate {tuple(gate.shape)}")
        per_token = int(gate.shape[1] != width) if gate.dtype is x.dtype else 2
        self._sigmoid_mul(
            torch.get_num_threads(), tokens, width, x.stride(0), gate.stride(0), per_token, x.dtype is _BF16,
            x.data_ptr(), gate.data_ptr(),
        )  # fmt: skip
        return x

    def rope(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        head_dim: int,
        axes: Tensor | None,
    ) -> Tensor:
        if not (is_wide(cos) and is_wide(sin)) or not is_index(positions) or qkv.stride(-1) != 1:
            return NotImplemented
        if not _axes_fit(axes):
            return NotImplemented
        check_rope(qkv, positions, cos, num_heads, head_dim, axes)
        self._rope_and_kv(
            torch.get_num_threads(), qkv.shape[0], num_heads, head_dim, cos.shape[1], cos.shape[0], qkv.stride(0), 0, 0,
            0, 0, 1 if axes is None else positions.shape[1], qkv.dtype is _BF16, qkv.data_ptr(), positions.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), 0, 0, 0, 0, 0, 0 if axes is None else axes.data_ptr(),
        )  # fmt: skip
        return qkv

    def write_kv(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> Any:
        tokens, kv_heads, head_dim = k.shape
        if not is_index(slots) or not is_token_heads(k) or not is_token_heads(v) or k.dtype is not k_pages.dtype:
            return NotImplemented
        if v.shape != k.shape or k_pages.shape[2:] != (kv_heads, head_dim) or slots.shape[0] < tokens:
            raise ValueError(f"write_kv: k {tuple(k.shape)}, v {tuple(v.shape)}, pages {tuple(k_pages.shape)}")
        check_pages(k, k_pages, v_pages)
        self._rope_and_kv(
            torch.get_num_threads(), tokens, 0, head_dim, 0, 0, 0, kv_heads * head_dim,
            k_pages.shape[0] * k_pages.shape[1], k.stride(0), v.stride(0), 0, k.dtype is _BF16, 0, 0, 0, 0,
            slots.data_ptr(), k.data_ptr(), v.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), 0,
        )  # fmt: skip
        return None

    def rope_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        num_q_heads: int,
        axes: Tensor | None,
    ) -> Tensor:
        if not (is_wide(cos) and is_wide(sin)) or not is_index(positions) or not is_index(slots) or qkv.stride(-1) != 1:
            return NotImplemented
        if not _axes_fit(axes):
            return NotImplemented
        num_pages, page_size, kv_heads, head_dim = k_pages.shape
        tokens, width = qkv.shape
        check_rope(qkv, positions, cos, num_q_heads + kv_heads, head_dim, axes)
        check_pages(qkv, k_pages, v_pages)
        if width != (num_q_heads + 2 * kv_heads) * head_dim or slots.shape[0] < tokens:
            raise ValueError(f"rope_write_kv: qkv {tuple(qkv.shape)} for {num_q_heads} + 2 * {kv_heads} heads")
        stride, data, kv_width = qkv.stride(0), qkv.data_ptr(), kv_heads * head_dim
        k = data + num_q_heads * head_dim * qkv.element_size()
        self._rope_and_kv(
            torch.get_num_threads(), tokens, num_q_heads + kv_heads, head_dim, cos.shape[1], cos.shape[0], stride,
            kv_width, num_pages * page_size, stride, stride, 1 if axes is None else positions.shape[1],
            qkv.dtype is _BF16, data, positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), k,
            k + kv_width * qkv.element_size(), k_pages.data_ptr(), v_pages.data_ptr(),
            0 if axes is None else axes.data_ptr(),
        )  # fmt: skip
        return qkv

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
    ) -> Any:
        _, heads, head_dim = q.shape
        num_pages, page_size, kv_heads, _ = k_pages.shape
        rows = kv_lens.shape[0]
        if not (is_token_heads(q) and is_token_heads(out) and is_index(kv_lens) and is_index(q_starts)):
            return NotImplemented
        if block_table.dtype is not torch.int32 or block_table.stride(1) != 1:
            return NotImplemented
        check_pages(q, k_pages, v_pages)
        if k_pages.shape[3] != head_dim or heads % kv_heads or out.shape != q.shape or out.dtype is not q.dtype:
            raise ValueError(f"paged_attend: q {tuple(q.shape)}, pages {tuple(k_pages.shape)}, out {tuple(out.shape)}")
        if block_table.shape[0] < rows or q_starts.shape[0] != rows + 1:
            raise ValueError(f"paged_attend: {rows} rows, {q_starts.shape[0]} starts, table {tuple(block_table.shape)}")
        self._paged_attend(
            torch.get_num_threads(), rows, heads, kv_heads, head_dim, page_size, num_pages, block_table.stride(0),
            q.stride(0), out.stride(0), causal, q.dtype is _BF16, scale, q.data_ptr(), k_pages.data_ptr(),
            v_pages.data_ptr(), block_table.data_ptr(), kv_lens.data_ptr(), q_starts.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def embedding(self, ids: Tensor, table: Tensor | PackedLinear, out: Tensor | None) -> Tensor:
        if ids.dim() != 1 or not ids.is_contiguous() or ids.dtype not in (torch.int32, torch.int64):
            return NotImplemented
        if isinstance(table, PackedLinear):
            vocab, width, dtype, data, is_packed = table.out_features, table.in_features, table.dtype, table.data, True
        else:
            (vocab, width), dtype, data, is_packed = table.shape, table.dtype, table, False
            if not table.is_contiguous():
                return NotImplemented
        if out is None:
            out = torch.empty((ids.shape[0], width), dtype=dtype)
        if out.shape != (ids.shape[0], width) or out.dtype is not dtype or out.stride(1) != 1:
            raise ValueError(f"embedding out is {tuple(out.shape)} {out.dtype}, not {(ids.shape[0], width)} {dtype}")
        self._embedding(
            torch.get_num_threads(), ids.shape[0], width, vocab, out.stride(0), dtype is _BF16,
            ids.dtype is torch.int64, is_packed, ids.data_ptr(), data.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def greedy(self, logits: Tensor, out: Tensor | None) -> Tensor:
        if logits.dim() != 2 or logits.stride(1) != 1:
            return NotImplemented
        rows, vocab = logits.shape
        if out is None:
            out = torch.empty(rows, dtype=torch.int32)
        if out.shape != (rows,) or out.dtype is not torch.int32 or not out.is_contiguous():
            raise ValueError(f"greedy out is {tuple(out.shape)} {out.dtype}, not {(rows,)} int32")
        self._greedy(
            torch.get_num_threads(), rows, vocab, logits.stride(0), logits.dtype is _BF16, logits.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out


def _axes_fit(axes: Tensor | None) -> bool:
    return axes is None or (is_index(axes) and axes.shape[0] <= _MAX_GATHERED)
