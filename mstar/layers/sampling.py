"""The layer that turns logits into tokens: a door to the sampler resource."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from mstar.engine.layer_handles import FindLayer, SamplerHandle


class Sampler(nn.Module):
    """Draws with the sampler resource `key`. `forward` runs in forwards, `stopped` on the loop thread."""

    _sampler: SamplerHandle

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def bind_resources(self, find: FindLayer) -> None:
        self._sampler = find(self.key, 0)

    def forward(self, logits: Tensor) -> Tensor:
        """`[rows, vocab]` → int32 `[rows]`."""
        return self._sampler.sample(logits)

    def stopped(self, handles: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """bool `[rows]`: true where the row's token (host copy) is one of its stop tokens."""
        return self._sampler.stopped(handles, tokens)
