"""A MessagePack reader of its own, written from the format's specification, to check what the product's encoder wrote.

Reads what the specification calls nil, bool, int, float, str, bin, array and map; an extension type is an error.
"""

from __future__ import annotations

import struct
from typing import Any


def read(data: bytes) -> Any:
    """The one value in `data`; bytes left over are an error."""
    value, end = _value(data, 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes after the value")
    return value


_FIXED = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_STR = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_BIN = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_ARRAY = {0xDC: ">H", 0xDD: ">I"}
_MAP = {0xDE: ">H", 0xDF: ">I"}
_CONSTANT = {0xC0: None, 0xC2: False, 0xC3: True}


def _number(data: bytes, at: int, form: str) -> tuple[Any, int]:
    size = struct.calcsize(form)
    return struct.unpack(form, data[at : at + size])[0], at + size


def _value(data: bytes, at: int) -> tuple[Any, int]:
    head, at = data[at], at + 1
    if head <= 0x7F:
        return head, at
    if head >= 0xE0:
        return head - 0x100, at
    if head in _CONSTANT:
        return _CONSTANT[head], at
    if head in _FIXED:
        return _number(data, at, _FIXED[head])
    if head & 0xE0 == 0xA0 or head in _STR:
        size, at = (head & 0x1F, at) if head not in _STR else _number(data, at, _STR[head])
        return data[at : at + size].decode("utf-8"), at + size
    if head in _BIN:
        size, at = _number(data, at, _BIN[head])
        return data[at : at + size], at + size
    if head & 0xF0 == 0x90 or head in _ARRAY:
        size, at = (head & 0x0F, at) if head not in _ARRAY else _number(data, at, _ARRAY[head])
        items = []
        for _ in range(size):
            item, at = _value(data, at)
            items.append(item)
        return items, at
    if head & 0xF0 == 0x80 or head in _MAP:
        size, at = (head & 0x0F, at) if head not in _MAP else _number(data, at, _MAP[head])
        pairs = {}
        for _ in range(size):
            key, at = _value(data, at)
            pairs[key], at = _value(data, at)
        return pairs, at
    raise ValueError(f"type byte {head:#04x} at {at - 1}")
