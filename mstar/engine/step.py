"""What a node tells the engine about one step: which rows touch which resource, with how many tokens each.

Columns of host integers; a model builds these in `declare_step`. No tensor, no per-row object.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """Rows of a step. `handles` int64 [rows], distinct; `spans` int32 [rows]: tokens each row adds (0: read only)."""

    handles: np.ndarray
    spans: np.ndarray
    label: str = "main"

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return int(np.add.reduce(self.spans))

    @property
    def single(self) -> bool:
        """Every row has exactly one token."""
        return bool(np.logical_and.reduce(self.spans == 1))

    def places(self, handles: np.ndarray) -> slice | np.ndarray:
        """Where these rows are among `handles` int64 [rows], distinct ones, which hold them all."""
        if self.handles is handles:
            return slice(None)
        order = np.argsort(handles)
        return order[np.searchsorted(handles, self.handles, sorter=order)]


@dataclass(frozen=True, slots=True)
class ResourceStep:
    """A resource's part in a step. `rows=None`: the rows of the `SubmoduleStep`."""

    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class KVStep(ResourceStep):
    """`write=False` reads a cache without extending it."""

    write: bool = True


@dataclass(frozen=True, slots=True)
class AttentionStep(ResourceStep):
    """`causal`: bottom-right aligned, so the last query of a row sees the whole row."""

    causal: bool = True


@dataclass(frozen=True, slots=True)
class PositionStep(ResourceStep):
    """Positions continue each row's length."""


@dataclass(frozen=True, slots=True)
class RecurrentStep(ResourceStep):
    """The rows' states go on by the step's tokens."""


@dataclass(frozen=True, slots=True)
class LinearAttentionStep(ResourceStep):
    """Linear attention over the rows' states."""


@dataclass(frozen=True, slots=True)
class EncodeStep(ResourceStep):
    """One step of encoding the rows' media."""


@dataclass(frozen=True, slots=True)
class SamplerStep(ResourceStep):
    """`kept` bool [rows]: rows that draw in this step (None: all)."""

    kept: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SubmoduleStep:
    """All resources of a node's step, by resource key. `cg_key_info` distinguishes captured variants."""

    steps: Mapping[str, ResourceStep]
    rows: Rows | None = None
    cg_key_info: Hashable = None
