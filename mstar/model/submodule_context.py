"""What a model's submodule factory gets to build a node from. Worker processes only: it names torch types."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mstar.model.base import ModelSetup
from mstar.model.loader.checkpoint import ResolvedCheckpoint
from mstar.model.loader.progress import LoadProgress


@dataclass(frozen=True, slots=True)
class SubmoduleContext:
    """`dtype` and `device` of the weights; `checkpoint` is None for a model that makes its own. `progress` gets the
    bytes loaded."""

    setup: ModelSetup
    checkpoint: ResolvedCheckpoint | None
    dtype: torch.dtype
    device: torch.device
    progress: LoadProgress | None = None
