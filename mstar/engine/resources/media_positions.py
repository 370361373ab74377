"""`MediaPositions`: temporal, vertical and horizontal position of every token of prompts that hold media.

Loop thread, host integers; of a request without media it keeps one number. Formula: Qwen2-VL (Wang et al. 2024), with
the temporal positions of each media item counted from its beginning by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mstar.communication.messages import MediaSpan
from mstar.engine.resources.cache_stream import token_positions

TEXT_GRID = (0, 0, 0)
"""Of media whose tokens stand in a line, as text does."""


class PromptPositions(NamedTuple):
    """`table` int32 [num_prompt, 3]; a token behind the prompt has all three positions at its index plus `delta`."""

    table: np.ndarray
    delta: int


def prompt_positions(num_prompt: int, media: Sequence[MediaSpan]) -> PromptPositions:
    """Text counts by one; media of a grid (t, h, w) begin where the text has come to and let it go on max(h, w) later.

    Raises:
        ValueError: a grid that is not as long as its span, spans that overlap, or one beyond the prompt.
    """
    table = np.empty((num_prompt, 3), np.int32)
    place, position = 0, 0
    for span in media:
        if span.grid == TEXT_GRID:
            continue
        times, height, width = span.grid
        if times * height * width != span.length or not place <= span.start <= num_prompt - span.length:
            raise ValueError(f"media of grid {span.grid} at token {span.start} does not fit its prompt of {num_prompt}")
        before = span.start - place
        table[place : span.start] = np.arange(position, position + before, dtype=np.int32)[:, None]
        position += before
        place = span.start + span.length
        table[span.start : place] = np.indices(span.grid, np.int32).reshape(3, -1).T + np.int32(position)
        position += max(height, width)
    table[place:] = np.arange(position, position + num_prompt - place, dtype=np.int32)[:, None]
    return PromptPositions(table, position - place)


class MediaPositions:
    """What is known of each handle: a table for a prompt with media, nothing for others."""

    def __init__(self, num_handles: int) -> None:
        self._tables: dict[int, np.ndarray] = {}
        self._table_ends = np.zeros(num_handles, np.int32)
        self._deltas = np.zeros(num_handles, np.int32)

    def introduce(self, handle: int, prompt_ids: np.ndarray | None, media: Sequence[MediaSpan]) -> None:
        """Raises `ValueError` as `prompt_positions`."""
        if prompt_ids is None or all(span.grid == TEXT_GRID for span in media):
            return
        table, delta = prompt_positions(prompt_ids.size, media)
        self._tables[handle] = table
        self._table_ends[handle] = table.shape[0]
        self._deltas[handle] = delta

    def close(self, handle: int) -> None:
        self._table_ends[handle] = self._deltas[handle] = 0
        self._tables.pop(handle, None)

    def write(self, out: np.ndarray, handles: np.ndarray, lengths: np.ndarray, spans: np.ndarray | None) -> None:
        """Positions of `spans[i]` tokens (None: one each) behind `lengths[i]`, packed, into `out` int32 [tokens, 3]."""
        deltas = self._deltas[handles]
        if spans is None:
            out[:] = (lengths + deltas)[:, None]
        else:
            out[:] = token_positions(lengths + deltas, spans)[:, None]
        if not self._tables:
            return
        in_table = np.flatnonzero(lengths < self._table_ends[handles])
        if not in_table.size:
            return
        begins = in_table if spans is None else (np.cumsum(spans) - spans)[in_table]
        for index, begin in zip(in_table.tolist(), begins.tolist(), strict=True):
            first = int(lengths[index])
            last = first + 1 if spans is None else first + int(spans[index])
            piece = self._tables[int(handles[index])][first:last]
            out[begin : begin + piece.shape[0]] = piece
