"""`Touched`: one resource's part in one step. Written on the loop thread, read by the executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.engine.resources.base import Resource, StepContext
from mstar.engine.staging import StepShape
from mstar.engine.step import ResourceStep, Rows


@dataclass(slots=True)
class Touched:
    """A resource's part in a step. `num_tokens` and `single` of its rows; `facts`: what its `plan` returned."""

    resource: Resource
    step: ResourceStep
    rows: Rows
    num_tokens: int
    single: bool
    facts: Any = None

    def context(self, staging: Mapping[str, np.ndarray], shape: StepShape, *, captured: bool = False) -> StepContext:
        """What the resource sees of the step."""
        return StepContext(self.rows, self.num_tokens, self.single, staging, shape, captured)
