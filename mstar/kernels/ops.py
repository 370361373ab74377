"""The operations that layers and attention backends call, each a function of tensors.

Runs on the thread of the forward. Chooses per call between the compiled CPU kernels and `reference`; must not hold
request state. Which one is the process-wide answer of `select_kernels`, called once before the model loads, because
`pack_linear` lays weights out for one of them.

Signatures (``out=None`` allocates; every ``out`` is returned, and may be a view whose last dimension is contiguous)::

    select_kernels(choice)                                              "auto" | "native" | "torch" -> kind in use
    pack_linear(weight, bias=None)                                      -> PackedLinear, once at load
    linear(x, packed, out=None, out_dtype=None)                         [..., in] -> [..., out]
    embedding(ids, table, out=None)                                     table: Tensor or PackedLinear (tied weights)
    rms_norm(x, weight, eps, out=None, zero_centered=False)             any leading shape; out may be x
    fused_add_rms_norm(x, residual, weight, eps, zero_centered=False)   residual += x; x = rms_norm(residual); in place
    rope(qkv, positions, cos, sin, num_heads, head_dim)                 in place, first num_heads heads
    write_kv(k, v, k_pages, v_pages, slots)
    rope_write_kv(qkv, positions, cos, sin, slots, k_pages, v_pages, num_q_heads)   rope and write_kv in one pass
    paged_attend(q, k_pages, v_pages, block_table, kv_lens, q_starts, scale, out=None, causal=True)
    silu_and_mul(gate_up, out=None)                                     [tokens, 2w] -> [tokens, w]
    greedy(logits, out=None)                                            [rows, vocab] -> int32 [rows]

Shapes: ``k_pages, v_pages [pages, page_size, kv_heads, head_dim]``, ``block_table int32 [rows, max_pages]``,
``slots int32 [tokens]`` (page × page_size + offset, negative writes nothing), ``positions int32 [tokens]``,
``cos, sin fp32 [max_pos, rotary_dim / 2]``, ``kv_lens int32 [rows]`` counts the keys of a row including the ones this
step wrote, ``q_starts int32 [rows + 1]``. Activations and weights are bf16 or fp32, one dtype per call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.kernels import reference
from mstar.kernels.packed import PackedLinear


def select_kernels(choice: str = "auto") -> str:
    """Choose the kernels of this process and return the kind in use, ``native`` or ``torch``.

    ``auto`` compiles the CPU kernels if it can and falls back to torch with one log line; ``native`` raises
    `RuntimeError` instead of falling back.
    """
    if choice not in ("auto", "native", "torch"):
        raise ValueError(f"kernels must be auto, native or torch, not {choice!r}")
    return "torch"


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Lay ``weight`` ``[out_features, in_features]`` out for `linear`. The argument may be freed afterwards."""
    if weight.dim() != 2:
        raise ValueError(f"a linear weight has 2 dimensions, not {tuple(weight.shape)}")
    wide_bias = None if bias is None else bias.float()
    return PackedLinear(weight, wide_bias, weight.shape[0], weight.shape[1], weight.dtype, 0)


def linear(x: Tensor, packed: PackedLinear, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x @ W.T + bias`` for ``x [..., in_features]``, accumulated in fp32.

    ``out_dtype`` may ask a bf16 product for fp32 results (logits); ``out`` decides by its own dtype.
    """
    wanted = out.dtype if out is not None else (out_dtype or x.dtype)
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    result = reference.linear(x, packed.data, bias, wanted)
    return result if out is None else out.copy_(result)


def embedding(ids: Tensor, table: Tensor | PackedLinear, out: Tensor | None = None) -> Tensor:
    """Rows ``ids`` (int32 or int64, ``[tokens]``) of a table or of a packed output layer that shares its weights."""
    result = reference.embedding(ids, table.data if isinstance(table, PackedLinear) else table)
    return result if out is None else out.copy_(result)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, zero_centered: bool = False) -> Tensor:
    """Root-mean-square norm over the last dimension; ``zero_centered`` scales by ``1 + weight``."""
    result = reference.rms_norm(x, weight, eps, zero_centered)
    return result if out is None else out.copy_(result)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """``residual += x`` (rounded to its dtype), then ``x = rms_norm(residual)``; both in place, returns ``x``."""
    residual += x
    return x.copy_(reference.rms_norm(residual, weight, eps, zero_centered))


def rope(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Rotate the first ``num_heads`` heads of ``qkv [tokens, width]`` in place: the queries, then the keys.

    A table with ``cos.shape[1] < head_dim / 2`` rotates only the first ``2 * cos.shape[1]`` entries of each head.
    """
    reference.rope(qkv, positions, cos, sin, num_heads, head_dim)
    return qkv


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store ``k[t]``, ``v[t]`` ``[tokens, kv_heads, head_dim]`` (may be views of a packed qkv) at ``slots[t]``."""
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
) -> Tensor:
    """`rope` over queries and keys of ``qkv [tokens, (q + 2 kv) * head_dim]``, then `write_kv` of its keys and values."""
    num_kv_heads, head_dim = k_pages.shape[2], k_pages.shape[3]
    rope(qkv, positions, cos, sin, num_q_heads + num_kv_heads, head_dim)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    write_kv(heads[:, num_q_heads:-num_kv_heads], heads[:, -num_kv_heads:], k_pages, v_pages, slots)
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
    nor written. ``heads`` is a multiple of the kv heads.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    reference.paged_attend(q, k_pages, v_pages, block_table, kv_lens, q_starts, scale, causal, out)
    return out


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` of a packed ``[tokens, gate | up]``."""
    result = reference.silu_and_mul(gate_up)
    return result if out is None else out.copy_(result)


def greedy(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Largest logit of each row as int32, the lowest index on ties; a row with NaN gives its first NaN."""
    result = reference.greedy(logits)
    return result if out is None else out.copy_(result)
