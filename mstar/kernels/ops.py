"""The operations that layers and attention backends call, each a function of tensors.

Runs on the thread of the forward. Chooses per call between the compiled kernels of the CPU, the Triton kernels of CUDA
tensors, and `reference`; must not hold request state. Whether a process has compiled kernels is the answer of
`select_kernels`, given once before the model loads, because `pack_linear` lays weights out for them. Both kinds serve
bf16 and fp32; other dtypes and layouts go to the reference.

With the compiled kernels a token's or row's result is the same bits whatever else is in the batch, for every operation
here, and the same whether its prompt came in one piece or many. The others do not promise that.

Signatures (``out=None`` allocates; every ``out`` is returned, and may be a view whose last dimension is contiguous)::

    select_kernels(choice=None)                                         "auto" | "native" | "torch" -> kind in use
    pack_linear(weight, bias=None)                                      -> PackedLinear, once at load
    linear(x, packed, out=None, out_dtype=None)                         [..., in] -> [..., out]
    gated_linear(x, packed, out=None)                                   silu_and_mul(linear(x, packed))
    linear_add_norm(x, packed, then)                                    fused_add_rms_norm(linear(x, packed), *then)
    embedding(ids, table, out=None)                                     table: Tensor or PackedLinear (tied weights)
    rms_norm(x, weight, eps, out=None, zero_centered=False)             any leading shape; out may be x
    fused_add_rms_norm(x, residual, weight, eps, zero_centered=False)   residual += x; x = rms_norm(residual); in place
    norm_heads(qkv, norms, num_q_heads, num_kv_heads, head_dim)         in place, queries and keys
    rope(qkv, positions, cos, sin, num_heads, head_dim, axes=None)      in place, first num_heads heads
    write_kv(k, v, k_pages, v_pages, slots)
    rope_write_kv(qkv, positions, cos, sin, slots, k_pages, v_pages, num_q_heads, axes=None, norms=None)
                                                                        both in one pass
    paged_attend(q, k_pages, v_pages, block_table, kv_lens, q_starts, scale, out=None, causal=True)
    silu_and_mul(gate_up, out=None)                                     [tokens, 2w] -> [tokens, w]
    sigmoid_mul(x, gate)                                                x *= sigmoid(gate); in place
    gated_rms_norm(x, z, weight, eps, out=None)                         rms_norm per head, times silu(z); out may be x
    gated_delta(qkv, b, a, conv_weight, a_log, dt_bias, conv_state, delta_state, slots, has_state, q_starts, key_heads,
                out=None, max_tokens=None, norm=None)                   convolution and gated delta rule over states
    pack_experts(weight)                                                -> PackedExperts, once at load
    router_top_k(logits, k)                                             -> (ids int32, weights fp32), [tokens, k]
    moe_mlp(x, expert_ids, expert_weights, gate_up, down, plus=None, out=None)      experts' gated MLPs, weighted sum
    greedy(logits, out=None)                                            [rows, vocab] -> int32 [rows]
    record(forward)                                                     -> (Tape, what forward returned)

Shapes: ``k_pages, v_pages [pages, page_size, kv_heads, head_dim]``, ``block_table int32 [rows, max_pages]``,
``slots int32 [tokens]`` (page × page_size + offset, negative writes nothing), ``positions int32 [tokens]`` (with
``axes int32 [rotary_dim / 2]`` int32 [tokens, 3]: frequency ``i`` turns by the token's position ``axes[i]``),
``cos, sin fp32 [max_pos, rotary_dim / 2]``, ``kv_lens int32 [rows]`` counts the keys of a row including the ones this
step wrote, ``q_starts int32 [rows + 1]``. Activations and weights are bf16 or fp32, one dtype per call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.kernels import reference
from mstar.kernels.cpu.native import NativeKernels
from mstar.kernels.experts import moe_mlp, pack_experts, router_top_k
from mstar.kernels.fused_norms import AddNorm, HeadNorms
from mstar.kernels.linear_attention import gated_delta, gated_rms_norm
from mstar.kernels.packed import PackedLinear
from mstar.kernels.selection import (
    compiled,
    compiled_for,
    compiled_to_pack,
    kernels_for,
    record,
    refuse_recording,
    select_kernels,
    triton_kernels,
    use_kernels,
)

__all__ = [
    "select_kernels",
    "use_kernels",
    "record",
    "pack_linear",
    "linear",
    "gated_linear",
    "linear_add_norm",
    "embedding",
    "rms_norm",
    "fused_add_rms_norm",
    "norm_heads",
    "rope",
    "write_kv",
    "rope_write_kv",
    "paged_attend",
    "silu_and_mul",
    "sigmoid_mul",
    "gated_delta",
    "gated_rms_norm",
    "pack_experts",
    "moe_mlp",
    "router_top_k",
    "greedy",
]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Lay ``weight`` ``[out_features, in_features]`` out for `linear`. The argument may be freed afterwards."""
    if weight.dim() != 2:
        raise ValueError(f"a linear weight has 2 dimensions, not {tuple(weight.shape)}")
    if compiled_to_pack() is not None and (native := compiled_for(weight)) is not None:
        return native.pack_linear(weight, bias)
    wide_bias = None if bias is None else bias.float()
    return PackedLinear(weight, wide_bias, weight.shape[0], weight.shape[1], weight.dtype, 0)


def linear(x: Tensor, packed: PackedLinear, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x @ W.T + bias`` for ``x [..., in_features]``, accumulated in fp32.

    ``out_dtype`` may ask a bf16 product for fp32 results (logits); ``out`` decides by its own dtype.
    """
    if packed.block and (native := compiled()) is not None:
        return native.linear(x, packed, out, out_dtype)
    if x.is_cuda and (device_kernels := triton_kernels()) is not None:
        result = device_kernels.linear(x, packed, out, out_dtype)
        if result is not NotImplemented:
            return result
    wanted = out.dtype if out is not None else (out_dtype or x.dtype)
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    return _into(out, reference.linear(x, packed.matrix(), bias, wanted))


def gated_linear(x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """`silu_and_mul` of `linear`, for a packed ``[gate | up]``."""
    if x.is_cuda and (device_kernels := triton_kernels()) is not None:
        result = device_kernels.gated_linear(x, packed, out)
        if result is not NotImplemented:
            return result
    return silu_and_mul(linear(x, packed), out)


def linear_add_norm(x: Tensor, packed: PackedLinear, then: AddNorm) -> Tensor:
    """`linear` of ``x [tokens, in_features]``, added to ``then.residual`` in place; returns the norm of that."""
    if x.is_cuda and (device_kernels := triton_kernels()) is not None:
        result = device_kernels.linear_add_norm(x, packed, then)
        if result is not NotImplemented:
            return result
    return fused_add_rms_norm(linear(x, packed), *then)


def embedding(ids: Tensor, table: Tensor | PackedLinear, out: Tensor | None = None) -> Tensor:
    """Rows ``ids`` (int32 or int64, ``[tokens]``) of a table or of a packed output layer that shares its weights."""
    if isinstance(table, Tensor):
        native = kernels_for(table)
    else:
        native = compiled() if table.block else triton_kernels() if table.data.is_cuda else None
    if native is not None and ids.is_cpu == isinstance(native, NativeKernels):
        result = native.embedding(ids, table, out)
        if result is not NotImplemented:
            return result
    return _into(out, reference.embedding(ids, table.matrix() if isinstance(table, PackedLinear) else table))


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, zero_centered: bool = False) -> Tensor:
    """Root-mean-square norm over the last dimension; ``zero_centered`` scales by ``1 + weight``."""
    if (native := kernels_for(x)) is not None:
        result = native.norm(x, None, weight, eps, out, zero_centered)
        if result is not NotImplemented:
            return result
    return _into(out, reference.rms_norm(x, weight, eps, zero_centered))


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """``residual += x`` (rounded to its dtype), then ``x = rms_norm(residual)``; both in place, returns ``x``."""
    if (native := kernels_for(x)) is not None:
        result = native.norm(x, residual, weight, eps, x, zero_centered)
        if result is not NotImplemented:
            return result
    residual += x
    return x.copy_(reference.rms_norm(residual, weight, eps, zero_centered))


def norm_heads(qkv: Tensor, norms: HeadNorms, num_q_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """`rms_norm` of each query and key head of ``qkv [tokens, (q + 2 kv) * head_dim]``, in place."""
    heads = qkv.unflatten(1, (-1, head_dim))
    queries, keys = heads[:, :num_q_heads], heads[:, num_q_heads : num_q_heads + num_kv_heads]
    rms_norm(queries, norms.q_weight, norms.eps, out=queries, zero_centered=norms.zero_centered)
    rms_norm(keys, norms.k_weight, norms.eps, out=keys, zero_centered=norms.zero_centered)
    return qkv


def rope(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    head_dim: int,
    axes: Tensor | None = None,
) -> Tensor:
    """Rotate the first ``num_heads`` heads of ``qkv [tokens, width]`` in place: the queries, then the keys.

    A table with ``cos.shape[1] < head_dim / 2`` rotates only the first ``2 * cos.shape[1]`` entries of each head.
    """
    if (native := kernels_for(qkv)) is not None:
        result = native.rope(qkv, positions, cos, sin, num_heads, head_dim, axes)
        if result is not NotImplemented:
            return result
    reference.rope(qkv, positions, cos, sin, num_heads, head_dim, axes)
    return qkv


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store ``k[t]``, ``v[t]`` ``[tokens, kv_heads, head_dim]`` (may be views of a packed qkv) at ``slots[t]``."""
    native = kernels_for(k)
    if native is not None and native.write_kv(k, v, k_pages, v_pages, slots) is not NotImplemented:
        return
    reference.write_kv(k, v, k_pages, v_pages, slots)


def rope_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    num_q_heads: int,
    axes: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`rope` over queries and keys of ``qkv [tokens, (q + 2 kv) * head_dim]``, then `write_kv` of keys and values.

    ``norms``: `rms_norm` of each query and key head before all that.
    """
    if qkv.is_cuda and norms is not None and (device_kernels := triton_kernels()) is not None:
        result = device_kernels.rope_write_kv(
            qkv, positions, cos, sin, slots, k_pages, v_pages, num_q_heads, axes, norms
        )
        if result is not NotImplemented:
            return result
    if norms is not None:
        norm_heads(qkv, norms, num_q_heads, *k_pages.shape[2:])
    if (native := kernels_for(qkv)) is not None:
        result = native.rope_write_kv(qkv, positions, cos, sin, slots, k_pages, v_pages, num_q_heads, axes)
        if result is not NotImplemented:
            return result
    num_kv_heads, head_dim = k_pages.shape[2], k_pages.shape[3]
    reference.rope(qkv, positions, cos, sin, num_q_heads + num_kv_heads, head_dim, axes)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    reference.write_kv(heads[:, num_q_heads:-num_kv_heads], heads[:, -num_kv_heads:], k_pages, v_pages, slots)
    return qkv


def paged_attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor,
    scale: float,
    out: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of ``q [tokens, heads, head_dim]`` (may be a view of a packed qkv) over paged keys and values.

    Row ``r`` owns queries ``q_starts[r]:q_starts[r + 1]`` and keys ``0:kv_lens[r]``, found in pages
    ``block_table[r]``; one query per row is decode, many are prefill, and both may share a call. Causal masks are
    aligned bottom-right. Queries that see no key get zeros. Tokens from ``q_starts[-1]`` on are padding: neither read
    nor written. ``heads`` is a multiple of the kv heads. ``out`` may be a view of a packed buffer and is not ``q``.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if (native := kernels_for(q)) is not None:
        result = native.paged_attend(q, k_pages, v_pages, block_table, kv_lens, q_starts, scale, causal, out)
        if result is not NotImplemented:
            return out
    refuse_recording("paged_attend")  # the reference reads lengths in Python
    reference.paged_attend(q, k_pages, v_pages, block_table, kv_lens, q_starts, scale, causal, out)
    return out


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` of a packed ``[tokens, gate | up]``."""
    if (native := kernels_for(gate_up)) is not None:
        result = native.silu_and_mul(gate_up, out)
        if result is not NotImplemented:
            return result
    return _into(out, reference.silu_and_mul(gate_up))


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x *= sigmoid(gate)``, in place. ``gate`` is shaped as ``x [tokens, width]``, or one for all of a token,
    ``[tokens, 1]``, then of the dtype of ``x`` or fp32."""
    if (native := kernels_for(x)) is not None:
        result = native.sigmoid_mul(x, gate)
        if result is not NotImplemented:
            return result
    return x.copy_(reference.sigmoid_mul(x, gate))


def greedy(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Largest logit of each row as int32, the lowest index on ties; a row with NaN gives its first NaN."""
    if (native := kernels_for(logits)) is not None:
        result = native.greedy(logits, out)
        if result is not NotImplemented:
            return result
    return _into(out, reference.greedy(logits))


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)
