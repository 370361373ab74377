"""`HostTensor` to and from arrays and tensors. Pure functions, any process; no torch unless a torch one is called."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from mstar.communication.messages import HostTensor

if TYPE_CHECKING:
    from torch import Tensor

_ARRAY_DTYPES: Final[dict[str, np.dtype]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64"),
    )
} | {"bfloat16": np.dtype("<u2")}


def from_numpy(array: np.ndarray, dtype: str | None = None) -> HostTensor:
    """Copies. `dtype="bfloat16"` says that the uint16 words of `array` are bfloat16 numbers.

    Raises:
        ValueError: a dtype that does not travel, or words that are not what `dtype` needs.
    """
    name = array.dtype.name if dtype is None else dtype
    stored = _ARRAY_DTYPES.get(name)
    if stored is None or array.dtype.name != stored.name:
        raise ValueError(f"array of {array.dtype} as {name}: expected one of {', '.join(_ARRAY_DTYPES)}, or its words")
    return HostTensor(name, array.shape, np.ascontiguousarray(array, stored).tobytes())


def to_numpy(tensor: HostTensor) -> np.ndarray:
    """A read-only view of the message's bytes; bfloat16 numbers as uint16 words.

    Raises:
        ValueError: an unknown dtype, or bytes that do not fill the shape.
    """
    dtype = _ARRAY_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"dtype {tensor.dtype!r} is unknown; expected one of {', '.join(_ARRAY_DTYPES)}")
    _require_filled(tensor, dtype.itemsize)
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)


def from_torch(tensor: Tensor) -> HostTensor:
    """Copies, from any device.

    Raises:
        ValueError: a dtype that does not travel.
    """
    # Imported here: the front reads its HostTensors through numpy and must stay free of torch.
    from mstar.communication.tensor_bytes import as_bytes, dtype_name  # noqa: PLC0415

    return HostTensor(dtype_name(tensor.dtype), tuple(tensor.shape), as_bytes(tensor).tobytes())


def to_torch(tensor: HostTensor) -> Tensor:
    """A copy in host memory.

    Raises:
        ValueError: an unknown dtype, or bytes that do not fill the shape.
    """
    import torch  # noqa: PLC0415  (see from_torch)

    from mstar.communication.tensor_bytes import dtype_named, of_bytes  # noqa: PLC0415

    dtype = dtype_named(tensor.dtype)
    _require_filled(tensor, dtype.itemsize)
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    return of_bytes(torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8), dtype, tensor.shape)


def _require_filled(tensor: HostTensor, itemsize: int) -> None:
    num_bytes = math.prod(tensor.shape) * itemsize
    if min(tensor.shape, default=0) < 0 or num_bytes != len(tensor.data):
        raise ValueError(f"{tensor.dtype} {tensor.shape} takes {num_bytes} bytes, the message has {len(tensor.data)}")
