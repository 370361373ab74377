"""Reads what stands before the tensors of a GGUF file: metadata and the table of tensors. No torch; any process.

The `gguf` library's own reader makes several array objects per vocabulary entry (2 s for a vocabulary of 49k, more for
larger ones, in each process that looks at the file); this one makes plain Python values in a few hundredths of that.
Constants, block sizes and dequantization stay the library's. Layout: the GGUF specification, versions 2 and 3, little
endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from mstar.model.loader.errors import CheckpointError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class GgufTensorEntry:
    """One row of the tensor table. `shape` is outermost dimension first, as torch has it; `offset` counts from the
    start of the file; `num_bytes` is the stored, possibly quantized, size."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensorEntry]


def read_gguf_header(path: Path) -> GgufHeader:
    """Metadata (strings, numbers, booleans, lists of them) and the table of tensors.

    Raises:
        CheckpointError: not a GGUF file, of an unknown version, damaged, truncated, or one part of a split file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, data)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except (ValueError, struct.error) as error:  # an empty file, a bad type id, bad UTF-8, a read past the end
        raise CheckpointError(f"{path} is not a complete GGUF file: {error}") from error
    if header.metadata.get("split.count", 1) > 1:
        raise CheckpointError(f"{path} is one part of a split file; join the parts with `llama-gguf-split --merge`")
    return header


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    if data[:4] != b"GGUF":
        raise ValueError(f"it begins with {data[:4]!r}, not with GGUF")
    version, num_tensors, num_values = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; 2 and 3, little endian, are supported")
    cursor = _Cursor(data, 24)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.number("I")))
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensorEntry] = {}
    for name, shape, ggml_type, relative, num_bytes in entries:
        if start + relative + num_bytes > len(data):
            missing = start + relative + num_bytes - len(data)
            raise ValueError(f"tensor {name} ends {missing} bytes after the end of the file; it is truncated")
        tensors[name] = GgufTensorEntry(name, shape, ggml_type, start + relative, num_bytes)
    if len(tensors) != len(entries):
        raise ValueError("two tensors have the same name")
    return GgufHeader(path, metadata, tensors)


def _tensor_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
    name = cursor.string()
    num_dims = cursor.number("I")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"tensor {name} claims {num_dims} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
    ggml_type = GGMLQuantizationType(cursor.number("I"))
    offset = cursor.number("Q")
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    num_elements = 1
    for size in shape:
        num_elements *= size
    return name, shape, ggml_type, offset, num_elements // block_elements * block_bytes


class _Cursor:
    """A position in the file that moves past each value it returns."""

    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        begin = self.at + 8
        self.at = begin + length
        if self.at > len(self.data):
            raise ValueError("a string ends after the end of the file; it is truncated")
        return self.data[begin : self.at].decode()

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind])
        item, length = GGUFValueType(self.number("I")), self.number("Q")
        if length > len(self.data):
            raise ValueError(f"an array claims {length} items, more than the file has bytes")
        if item in _SCALARS:
            code = f"<{length}{_SCALARS[item]}"
            values = list(struct.unpack_from(code, self.data, self.at))
            self.at += struct.calcsize(code)
            return values
        return [self.value(item) for _ in range(length)]
