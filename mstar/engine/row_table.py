"""What the engine knows of each open request apart from its resources: the prompt. Columns by handle, loop thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from mstar.engine.resources.base import OpenConfig


class RowTable:
    """`num_prompt` int32 [capacity + 1]; `is_open` bool. The last entry is the sink's."""

    def __init__(self, capacity: int) -> None:
        self.num_prompt = np.zeros(capacity + 1, np.int32)
        self.is_open = np.zeros(capacity + 1, np.bool_)
        self._prompts: list[np.ndarray | None] = [None] * (capacity + 1)

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
