"""Attention of packed items that see the items of their own segment, all of them and no others: patches of an image.

Pure functions of tensors, on the thread of the forward. A caller that knows the segments on the host says so and gets
products of their sizes; a captured forward has their borders in memory only, and other items behind the last segment,
which may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_MULTIPLE = 8
"""Of a head's dimensions."""


def segment_attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """`[items, heads, head_dim]`, scaled by `head_dim ** -0.5`, for `q`, `k` and `v` of that shape.

    `starts` int32 [segments + 1]: items `starts[i] : starts[i + 1]` are segment i, which may be empty. `lengths`: of
    the segments, none empty, together all items; None: not known on the host, and items from `starts[-1]` on are in
    none (their results are undefined, and reach nobody).
    """
    if q.is_cuda and q.dtype in _FLASH_DTYPES and q.shape[2] % _FLASH_MULTIPLE == 0:
        # Here, because it brings torch's compiler and Triton along, which a worker on a CPU does without.
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

        longest = q.shape[0] if lengths is None else max(lengths)
        out = varlen_attn(q, k, v, starts, starts, longest, longest)
        assert isinstance(out, Tensor)  # a pair only where more is asked for
        return out
    return _by_mask(q, k, v, starts) if lengths is None else _by_length(q, k, v, lengths)


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`q [segments, queries, heads, head_dim]` to all of `k` and `v [segments, keys, heads, head_dim]`."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _by_length(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Neighbouring segments of one length share a product."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    begin = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        end = begin + count * length
        own_q, own_k, own_v = (t[begin:end].unflatten(0, (count, length)) for t in (q, k, v))
        out[begin:end] = attend_all(own_q, own_k, own_v).flatten(0, 1)
        begin = end
    return out


def _by_mask(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Every item with every other; those of other segments count nothing. What a masked item holds is still multiplied
    by zero, so that what is in no segment must be finite."""
    place = torch.arange(q.shape[0], dtype=starts.dtype, device=q.device)
    segment = torch.searchsorted(starts[1:].contiguous(), place, right=True)
    outside = (place >= starts[-1])[:, None, None]
    k, v = k.masked_fill(outside, 0), v.masked_fill(outside, 0)
    mask = segment[:, None] == segment
    packed = (each.transpose(0, 1)[None] for each in (q, k, v))
    return F.scaled_dot_product_attention(*packed, attn_mask=mask)[0].transpose(0, 1)
