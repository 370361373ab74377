"""What the compiled kernels ask of a tensor's memory: strides, index types, tables, pages.

Pure questions, on the thread of the forward. Must not read values.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FP32 = torch.float32


def outer_inner(x: Tensor) -> tuple[int, int, int, int] | None:
    """``(outer, inner, outer stride, inner stride)`` of the leading dimensions; None if they are more than two."""
    if x.stride(-1) != 1:
        return None
    shape, strides = x.shape, x.stride()
    if len(shape) == 2:
        return shape[0], 1, strides[0], 0
    if len(shape) == 3:
        return shape[0], shape[1], strides[0], strides[1]
    return (x.numel() // shape[-1], 1, shape[-1], 0) if x.is_contiguous() and x.numel() else None


def is_index(x: Tensor) -> bool:
    return x.dtype is torch.int32 and x.is_contiguous()


def is_wide(x: Tensor) -> bool:
    """True for contiguous fp32."""
    return x.dtype is _FP32 and x.is_contiguous()


def is_token_columns(x: Tensor, like: Tensor) -> bool:
    """True for ``[tokens, width]`` of the dtype of ``like``, each token's columns side by side."""
    return x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1) and x.dtype is like.dtype


def is_token_heads(x: Tensor) -> bool:
    """True when the heads of a token ``[tokens, heads, head_dim]`` follow each other in memory."""
    _, head_stride, inner = x.stride()
    return inner == 1 and (head_stride == x.shape[2] or x.shape[1] == 1)


def check_rope(qkv: Tensor, positions: Tensor, cos: Tensor, num_heads: int, head_dim: int, axes: Tensor | None) -> None:
    tokens, width = qkv.shape
    if num_heads * head_dim > width or 2 * cos.shape[1] > head_dim or positions.shape[0] < tokens:
        raise ValueError(
            f"rope: qkv {tuple(qkv.shape)}, {num_heads} heads of {head_dim}, table {tuple(cos.shape)}, "
            f"{positions.shape[0]} positions"
        )
    if positions.dim() != (1 if axes is None else 2) or (axes is not None and axes.shape[0] != cos.shape[1]):
        raise ValueError(
            f"rope: positions {tuple(positions.shape)} and axes {None if axes is None else tuple(axes.shape)} "
            f"for {cos.shape[1]} frequencies"
        )


def check_pages(x: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    if v_pages.shape != k_pages.shape or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError(f"pages {tuple(k_pages.shape)} and {tuple(v_pages.shape)} must be equal and contiguous")
    if k_pages.dtype is not x.dtype or v_pages.dtype is not x.dtype:
        raise ValueError(f"pages hold {k_pages.dtype} and {v_pages.dtype}, the step computes {x.dtype}")
