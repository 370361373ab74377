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
    items before them. With the end of the stream known, the last pass takes the remainder, however short. Items with
    different walk tags never share a window: at a change of tag the policy ends and starts anew.

    `hold_last`: a full chunk waits until it is known whether it is the last one (the next item or the end arrives), so
    that a pass can always be told that it is final. Without it a chunk goes one item earlier, but a stream whose last
    chunk is full may end after its last pass.
    """

    stride: int
    context: int = 0
    first: int | None = None
    hold_last: bool = True

    def window(self, consumed: int, available: int, more: bool | None) -> ChunkWindow | None:
        """The next pass, counted from the first item of a run of equal tags; None: wait.

        `consumed` items were new to a pass so far, `available` have arrived. `more`: whether items follow those
        (None: not known yet).
        """
        size = self.first if self.first is not None and consumed == 0 else self.stride
        stop = consumed + size
        if available < stop:
            if more is not False or available <= consumed:
                return None
            stop = available
        elif available == stop and more is None and self.hold_last:
            return None
        is_last = more is False and stop == available
        return ChunkWindow(max(0, consumed - self.context), stop, stop if is_last else max(0, stop - self.context))


def fixed(size: int, hold_last: bool = True) -> ChunkPolicy:
    """Disjoint chunks of `size` items."""
    return ChunkPolicy(stride=size, hold_last=hold_last)


def sliding(window: int, stride: int, hold_last: bool = True) -> ChunkPolicy:
    """Windows of `window` items that advance by `stride` <= `window`; the first pass waits for a full window."""
    return ChunkPolicy(stride=stride, context=window - stride, first=window, hold_last=hold_last)


def left_context(chunk: int, context: int, first: int | None = None, hold_last: bool = True) -> ChunkPolicy:
    """Chunks of `chunk` new items with up to `context` items of the past; `first` makes an early small first chunk."""
    return ChunkPolicy(stride=chunk, context=context, first=first, hold_last=hold_last)
