"""The media encoder's side of a cache of features: what a step has to encode, and where its results go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from mstar.engine.layer_handles import EncoderCacheHandle, FindLayer, PendingMedia

__all__ = ["EncodedMedia", "PendingMedia"]


class EncodedMedia(nn.Module):
    """Reaches the node's `EncoderCacheSpec` resource under `key` (see
    `mstar.engine.layer_handles.EncoderCacheHandle`)."""

    handle: EncoderCacheHandle

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def bind_resources(self, find: FindLayer) -> None:
        self.handle = find(self.key, 0)

    def pending_grids(self, handles: np.ndarray) -> Sequence[Sequence[tuple[int, int, int]]]:
        """Host side: grids of the media that each row encodes, in all of its steps together."""
        return self.handle.pending_grids(handles)

    def pending(self) -> Sequence[PendingMedia]:
        """What the rows of the running step have to encode, in order."""
        return self.handle.pending()

    def forward(self, features: Sequence[Tensor | None]) -> list[Tensor]:
        """`features[i]` of `pending()[i]`, None before its end → each row's features, `[media tokens, width]`, those
        that were cached among them; empty for a row that is not at its end."""
        return self.handle.complete(features)
