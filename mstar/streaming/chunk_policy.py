"""Chunk policies: arithmetic from "items so far" to "window of the next pass". Pure integers, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ChunkWindow(NamedTuple):
    """Items `[start, stop)` are handed to the next pass; items below `keep_from` are never needed again."""

    start: int
    stop: int
    keep_from: int


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """Declares how a stream is cut; build one with `fixed`, `sliding` or `left_context`.

    Pass k (from 0) consumes `stride` new items (a smaller `first` for pass 0 when given) together with up to `context`
    items before them. With the end of the stream known, the last pass takes the remainder, however short.
    """

    stride: int
    context: int = 0
    first: int | None = None


def fixed(size: int) -> ChunkPolicy:
    """Disjoint chunks of `size` items."""
    return ChunkPolicy(stride=size)


def sliding(window: int, stride: int) -> ChunkPolicy:
    """Windows of `window` items that advance by `stride`; the first pass waits for a full window."""
    return ChunkPolicy(stride=stride, context=window - stride, first=window)


def left_context(chunk: int, context: int, first: int | None = None) -> ChunkPolicy:
    """Chunks of `chunk` new items with up to `context` items of the past; `first` makes an early small first chunk."""
    return ChunkPolicy(stride=chunk, context=context, first=first)
