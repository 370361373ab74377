"""What the engine knows of each open request apart from its resources: token ids. Columns by handle, loop thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from mstar.engine.resources.base import OpenConfig


class RowTable:
    """`num_prompt` int32 [capacity + 1]; `is_open` bool. The last entry is the sink's."""

    def __init__(self, capacity: int, max_seq_len: int = 0) -> None:
        self.num_prompt = np.zeros(capacity + 1, np.int32)
        self.is_open = np.zeros(capacity + 1, np.bool_)
        self._prompts: list[np.ndarray | None] = [None] * (capacity + 1)
        self._max_seq_len = max_seq_len
        self._drawn: dict[str, np.ndarray] = {}

    def open(self, handle: int, config: OpenConfig) -> None:
        prompt = config.prompt_ids
        self._prompts[handle] = prompt
        self.num_prompt[handle] = 0 if prompt is None else prompt.size
        self.is_open[handle] = True

    def close(self, handle: int) -> None:
        self._prompts[handle] = None
        self.num_prompt[handle] = 0
        self.is_open[handle] = False

    def prompts(self, handles: np.ndarray) -> PromptColumn:
        return PromptColumn(self._prompts, handles)

    def drawn_by(self, sampler: str) -> np.ndarray:
        """int32 [capacity + 1, max_seq_len + 1]: ids that the sampler drew for each row, by draw. Entries past a row's
        draws are an earlier request's. One table per sampler, made when first asked for; the memory of rows that never
        draw is never touched."""
        if sampler not in self._drawn:
            self._drawn[sampler] = np.zeros((self.num_prompt.size, self._max_seq_len + 1), np.int32)
        return self._drawn[sampler]

    def token_ids(self, handle: int, begin: int, end: int, drawn: np.ndarray | None) -> np.ndarray:
        """int32 [end - begin]: ids of the row's tokens at those positions: the prompt, then those of `drawn`."""
        prompt = self._prompts[handle]
        num_prompt = int(self.num_prompt[handle])
        ids = np.empty(end - begin, np.int32)
        split = min(max(num_prompt - begin, 0), ids.size)
        if prompt is not None:
            ids[:split] = prompt[begin : begin + split]
        if split < ids.size:
            if drawn is None:
                raise LookupError(f"handle {handle} has {num_prompt} known token ids, {end} were asked for")
            ids[split:] = drawn[handle, begin + split - num_prompt : end - num_prompt]
        return ids


class PromptColumn(Sequence[np.ndarray | None]):
    """Prompt ids by row, looked up when asked: a decode step never asks."""

    __slots__ = ("_handles", "_prompts")

    def __init__(self, prompts: list[np.ndarray | None], handles: np.ndarray) -> None:
        self._prompts = prompts
        self._handles = handles

    def __len__(self) -> int:
        return self._handles.size

    @overload
    def __getitem__(self, index: int) -> np.ndarray | None: ...
    @overload
    def __getitem__(self, index: slice) -> PromptColumn: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | PromptColumn | None:
        if isinstance(index, slice):
            return PromptColumn(self._prompts, self._handles[index])
        return self._prompts[self._handles[index]]
