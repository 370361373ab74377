"""`Touched`: one resource's part in one step. Written on the loop thread, read by the executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mstar.engine.resources.base import Resource
from mstar.engine.step import ResourceStep, Rows


@dataclass(slots=True)
class Touched:
    """A resource's part in a step. `facts`: what its `plan` returned."""

    resource: Resource
    step: ResourceStep
    rows: Rows
    facts: Any = None
