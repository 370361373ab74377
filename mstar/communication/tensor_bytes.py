"""Tensors as bytes and back, without copies where memory allows. Pure functions, worker processes only (torch)."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

_DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """
    Raises:
        ValueError: no tensor of this dtype travels (quantized ones, for example).
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise ValueError(f"{dtype} has no name on the wire; expected one of {', '.join(_DTYPES)}")
    return name


def dtype_named(name: str) -> torch.dtype:
    """
    Raises:
        ValueError: not a name that `dtype_name` gives.
    """
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"dtype {name!r} is unknown; expected one of {', '.join(_DTYPES)}")
    return dtype


def as_bytes(tensor: Tensor) -> np.ndarray:
    """uint8 `[nbytes]` in row-major order: a view of a contiguous CPU tensor, a copy of any other."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def of_bytes(raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """View of uint8 `[nbytes]`, whose first byte is aligned to the dtype, as `shape`.

    Raises:
        RuntimeError: the bytes do not fill the shape exactly.
    """
    return raw.view(dtype).view(shape)
