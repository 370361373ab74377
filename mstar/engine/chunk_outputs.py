"""`ChunkOutputs`: outputs of a chunked walk that grow over its chunks, kept until the last one.

A resource of its node, made by the engine where a policy accumulates. The pieces live with the executor; the loop
thread only says, in order, which requests have gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mstar.engine.resources.base import OpenConfig, Resource, Work
from mstar.engine.step import ResourceStep

KEY = "engine.chunk_outputs"


class ChunkOutputs(Resource[ResourceStep]):
    """See the module docstring."""

    def __init__(self) -> None:
        self.key = KEY
        self._pieces: dict[int, dict[str, list[Tensor]]] = {}
        self._gone: list[int] = []

    def open(self, handle: int, config: OpenConfig) -> None:
        """Nothing yet."""

    def close(self, handle: int) -> None:
        self._gone.append(handle)

    def cancel_open(self, handle: int) -> None:
        self.close(handle)

    def layer(self, index: int) -> Any:
        raise LookupError(f"{KEY} is the engine's own")

    def drain_work(self) -> Sequence[Work]:
        if not self._gone:
            return ()
        gone, self._gone = self._gone, []
        return (partial(self._forget, gone),)

    def keep(self, handle: int, signal: str, begin: int, piece: Tensor) -> None:
        """A chunk's output `[tokens, ...]` from token `begin` on, of a row that goes on; copied. Executor."""
        pieces = self._before(handle, signal, begin)
        self._pieces.setdefault(handle, {})[signal] = [*pieces, piece.clone()]

    def join(self, handle: int, signal: str, begin: int, last: Tensor) -> Tensor:
        """The whole output of a row whose last chunk this is. Executor."""
        pieces = self._before(handle, signal, begin)
        self._pieces.get(handle, {}).pop(signal, None)
        return torch.cat([*pieces, last]) if pieces else last

    def _before(self, handle: int, signal: str, begin: int) -> list[Tensor]:
        """What is kept of the tokens before `begin`: a row whose cache was taken away computes some of them again."""
        kept: list[Tensor] = []
        for piece in self._pieces.get(handle, {}).get(signal, ()):
            if begin > 0:
                kept.append(piece[:begin])
                begin -= piece.shape[0]
        return kept

    def _forget(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._pieces.pop(handle, None)
