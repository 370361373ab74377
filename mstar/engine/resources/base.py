"""`Resource`: the contract between the step runner and everything a node keeps between steps.

Control plane (`open` ... `publish`) runs on the worker's loop thread on host integers only. Data plane (`bind`,
`layer`, and what layer handles do) runs where the device executor runs, and reads only the step's staging slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mstar.communication.messages import PlanRow, SamplingParams
from mstar.engine.execution import AdmitOutcome
from mstar.engine.step import ResourceStep, Rows

if TYPE_CHECKING:
    from mstar.engine.staging import StagingField


class OpenConfig(NamedTuple):
    """What a resource learns of a request: its sampling, its prompt length and the most tokens it may ever hold."""

    sampling: SamplingParams
    prompt_ids: np.ndarray | None
    max_total_tokens: int


class Transaction:
    """Undo log of one step's control-plane changes: `undo(f)` registers, `rollback` runs them newest first."""

    __slots__ = ("_undo", "open")

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.open = True

    def undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def commit(self) -> None:
        self._close()
        self._undo.clear()

    def rollback(self) -> None:
        self._close()
        while self._undo:
            self._undo.pop()()

    def _close(self) -> None:
        if not self.open:
            raise RuntimeError("a transaction is closed exactly once")
        self.open = False


class StepContext(NamedTuple):
    """What every resource sees of a step: the node's own rows, and where its staging fields are (numpy views of the
    slot, by field name)."""

    rows: Rows
    staging: Mapping[str, np.ndarray]
    num_padded_rows: int
    num_padded_tokens: int


class Resource(ABC):
    """One resource of one node group. See `docs/architecture.rst`, "Engine"."""

    key: str
    force_double_buffer = False

    # control plane
    @abstractmethod
    def open(self, handle: int, config: OpenConfig) -> None: ...
    @abstractmethod
    def close(self, handle: int) -> None: ...

    def reserve(self, handle: int, num_tokens: int) -> bool:
        """Promise room for a whole request before its first step; False: not now. `close` gives it back."""
        return True

    def most_tokens(self) -> int | None:
        """Tokens one request could hold with the pool empty; None: no limit."""
        return None

    def admit(self, step: ResourceStep, ctx: StepContext, txn: Transaction) -> AdmitOutcome:
        """Reserve what the rows need; on refusal change nothing."""
        return AdmitOutcome()

    def plan(self, step: ResourceStep, ctx: StepContext) -> Any:
        """Write addresses into the step's staging slot; returns host facts the forward needs (kept with the step)."""
        return None

    def advance(self, step: ResourceStep, ctx: StepContext, txn: Transaction) -> None:
        """Move lengths and draw indices; undone by a rollback."""

    def publish(self, step: ResourceStep, rows: Rows) -> None:
        """The rows' step has ended well: seal what is full."""

    # data plane
    @abstractmethod
    def layer(self, index: int) -> Any:
        """The layer handle that a layer binds at load time."""

    def staging_fields(self) -> Sequence[StagingField]:
        return ()

    def begin_forward(self, plan: Any, staging: Mapping[str, Any]) -> None:
        """Point the layer handles at this step's plan and staged tensors; runs on the executor, before the forward."""

    def memory_plan(self) -> Sequence[PlanRow]:
        return ()

    def gauges(self) -> Mapping[str, float]:
        return {}
