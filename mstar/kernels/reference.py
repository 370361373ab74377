"""Every kernel written as plain torch: the specification the compiled kernels are tested against, and their fallback.

Runs on the thread of the forward, on any device and floating dtype. Must not allocate state, read the environment or
know which model calls it. Values are computed in fp32 and rounded to the tensor's dtype once, except where a docstring
names a second rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mstar.kernels.fused_norms import HeadNorms


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """``x / sqrt(mean(x²) + eps)`` over the last dimension, scaled by ``weight`` or, zero-centred, by ``1 + weight``.

    The plain form rounds the normalized value to the dtype of ``x`` before the scale and the product once more, as
    the Llama family does; the zero-centred form scales in fp32 and rounds once, as Gemma and Qwen3.5 do.
    """
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normalized * (1.0 + weight.float())).to(x.dtype)
    return (normalized.to(x.dtype).float() * weight.float()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ weight.T + bias`` with fp32 accumulation; ``weight`` is ``[out_features, in_features]``."""
    if out_dtype == x.dtype:
        return functional.linear(x, weight, bias)
    wide_bias = None if bias is None else bias.to(out_dtype)
    return functional.linear(x.to(out_dtype), weight.to(out_dtype), wide_bias)


def rope(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    head_dim: int,
    axes: Tensor | None = None,
) -> None:
    """Rotate-half rotary embedding, in place, of the first ``num_heads`` heads of ``qkv`` ``[tokens, width]``.

    The rotated part of a head is its first ``2 * cos.shape[1]`` entries: ``(a, b) -> (a·cos - b·sin, b·cos + a·sin)``
    with ``a`` the first and ``b`` the second half of that part. Frequency ``i`` takes the angle of the token's
    position or, with ``axes``, of its position ``axes[i]`` of several (``positions [tokens, axes]``).
    """
    tokens, half = qkv.shape[0], cos.shape[1]
    heads = qkv[:, : num_heads * head_dim].view(tokens, num_heads, head_dim)
    index = positions[:tokens].long()
    if axes is None:
        c, s = cos[index], sin[index]  # [tokens, half]
    else:
        rows, columns = index[:, axes.long()], torch.arange(half, device=cos.device)
        c, s = cos[rows, columns], sin[rows, columns]
    c, s = c.unsqueeze(1), s.unsqueeze(1)
    a, b = heads[..., :half].float(), heads[..., half : 2 * half].float()
    rotated = (a * c - b * s).to(qkv.dtype), (b * c + a * s).to(qkv.dtype)  # in fp32, a and b are views of the heads
    heads[..., :half], heads[..., half : 2 * half] = rotated


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store token ``t``'s ``k[t]`` and ``v[t]`` ``[kv_heads, head_dim]`` at ``slots[t]`` (page × page_size + offset).

    A negative slot writes nothing. Slots are distinct.
    """
    keep = slots >= 0
    index = slots[keep].long()
    page_size = k_pages.shape[1]
    page, offset = index // page_size, index % page_size
    k_pages[page, offset] = k[keep].to(k_pages.dtype)
    v_pages[page, offset] = v[keep].to(v_pages.dtype)


def paged_attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor,
    scale: float,
    causal: bool,
    out: Tensor,
) -> None:
    """Softmax attention of each row's queries over that row's pages; see `mstar.kernels.ops.paged_attend`.

    The causal mask is aligned bottom-right: the last query of a row sees all ``kv_lens[row]`` keys.
    """
    page_size, num_kv_heads = k_pages.shape[1], k_pages.shape[2]
    group = q.shape[1] // num_kv_heads
    starts, lens = q_starts.tolist(), kv_lens.tolist()
    for row, kv_len in enumerate(lens):
        first, last = starts[row], starts[row + 1]
        if last == first:
            continue
        if kv_len == 0:
            out[first:last] = 0
            continue
        pages = block_table[row, : (kv_len + page_size - 1) // page_size].long()
        k = k_pages[pages].flatten(0, 1)[:kv_len].float().repeat_interleave(group, 1)  # [kv_len, heads, head_dim]
        v = v_pages[pages].flatten(0, 1)[:kv_len].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k) * scale
        if causal:
            limit = torch.arange(last - first, device=q.device) + (kv_len - (last - first))
            hidden = torch.arange(kv_len, device=q.device)[None, :] > limit[:, None]  # [q_len, kv_len]
            scores = scores.masked_fill(hidden, float("-inf"))
        probs = torch.softmax(scores, -1).nan_to_num(0.0) if causal and kv_len < last - first else scores.softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", probs, v).to(out.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``gate_up`` ``[tokens, 2 * width]`` holding the gate in its first half."""
    gate, up = gate_up.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def norm_heads(qkv: Tensor, norms: HeadNorms, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """`rms_norm` of each query and key head of ``qkv`` ``[tokens, (q + 2 kv) * head_dim]``, in place."""
    heads = qkv.unflatten(1, (-1, head_dim))
    for part, weight in (
        (heads[:, :num_q_heads], norms.q_weight),
        (heads[:, num_q_heads : num_q_heads + num_kv_heads], norms.k_weight),
    ):
        part.copy_(rms_norm(part, weight, norms.eps, norms.zero_centered))


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain `rms_norm` of each head of ``x [tokens, heads * dim]`` (``weight [dim]``), times ``silu(z)``.

    The norm rounds as `rms_norm` does, the product once more, as the gated delta nets of the Qwen family do.
    """
    heads = x.unflatten(-1, (-1, weight.shape[0]))
    normalized = rms_norm(heads, weight, eps, False).flatten(1)
    return (normalized.float() * functional.silu(z.float())).to(x.dtype)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows ``ids`` of ``table`` ``[vocab, width]``."""
    return table[ids.long()]


def greedy(logits: Tensor) -> Tensor:
    """Index of each row's largest logit as int32, the lowest index on ties; the first NaN counts as the largest."""
    return logits.argmax(-1).to(torch.int32)
