"""`Resource`: the contract between the step runner and everything a node keeps between steps.

Control plane (`introduce` ... `publish`) runs on the worker's loop thread on host integers only. Data plane (`layer`
... `narrow`, and what layer handles do) runs where the device executor runs, and reads only the step's staging slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from mstar.communication.messages import MediaSpan, SamplingParams
from mstar.engine.execution import AdmitOutcome, AllowedTokens, StepOutputs
from mstar.engine.step import ResourceStep, Rows
from mstar.engine.transaction import Transaction

if TYPE_CHECKING:
    from torch import Tensor

    from mstar.engine.device_graph import GraphMemory
    from mstar.engine.staging import StagingField, StepShape


class OpenConfig(NamedTuple):
    """What a resource learns of a request: its sampling, its prompt and the most tokens it may ever hold; and what its
    prompt's bytes in a cache depend on besides its ids. `has_inputs`: it comes with tensors, by signal name.
    `spans_workers`: other workers have a part in it, so that it may hold room here while it waits for some there.
    `shares`: others may use what it computes of its prompt, and it what they have computed."""

    sampling: SamplingParams
    prompt_ids: np.ndarray | None
    max_total_tokens: int
    media: tuple[MediaSpan, ...] = ()
    cache_salt: str = ""
    has_inputs: bool = False
    spans_workers: bool = False
    shares: bool = True


class StepContext(NamedTuple):
    """What every resource sees of a step: the node's own rows (or the declared ones), how many tokens they have and
    whether each has exactly one (`single`); and, from `plan` on, where its staging fields are (numpy views of the
    staging slot, by field name) and their padded shape. `captured`: the step is a replay, or what is being captured."""

    rows: Rows
    num_tokens: int
    single: bool
    staging: Mapping[str, np.ndarray]
    shape: StepShape
    captured: bool = False


Work = Callable[[], None]
"""A piece of device work: runs on the executor, in submission order."""


S = TypeVar("S", bound=ResourceStep)


class Resource(ABC, Generic[S]):
    """One resource of one node group; `S` is its part in a step. See `docs/architecture.rst`, "Engine"."""

    key: str
    reads: tuple[str, ...] = ()
    """Keys of resources whose staged fields this one reads: a step that touches it must touch them."""
    force_double_buffer = False
    """`plan` writes device buffers of its own instead of staging everything; it then alternates between two."""
    repeatable = True
    """A forward that did not come to its end may run again: what it wrote here is written over."""

    # control plane
    def introduce(self, handle: int, config: OpenConfig) -> None:
        """The request is known, and waits for its room; called once, before everything else."""

    def reserve(self, handle: int) -> bool:
        """Promise an introduced request what it needs to run to its end; False: not now, and nothing has changed."""
        return True

    def withdraw(self, handle: int) -> None:
        """Undo `reserve`: another resource has no room."""

    @abstractmethod
    def open(self, handle: int, config: OpenConfig) -> None:
        """Raises `ValueError`, with a message for the client, for a request that this resource cannot serve."""

    @abstractmethod
    def close(self, handle: int) -> None:
        """Forget the handle, however far it has come; no step may hold a row of it."""

    def cancel_open(self, handle: int) -> None:
        """Undo `open`, but keep promised room: another resource refused the request."""

    def most_tokens(self) -> int | None:
        """Tokens one request could hold with the pool empty; None: no limit."""
        return None

    def num_pages(self, step: S, rows: Rows) -> int:
        """Width of the step's page tables: pages of the longest row after the step (0: it has no table)."""
        return 0

    def admit(self, step: S, ctx: StepContext, txn: Transaction) -> AdmitOutcome:
        """Reserve what the rows need; on refusal change nothing."""
        return AdmitOutcome()

    def plan(self, step: S, ctx: StepContext) -> Any:
        """Write addresses of the real rows into the step's staging slot (the engine fills the padding from the fields'
        declarations); returns host facts the forward needs. Lengths are those before the step. Touches no device."""
        return None

    def capturable(self, plan: Any, captured: Any) -> bool:
        """Whether a forward captured with the plan `captured` (of no rows) does what `plan` asks for."""
        return True

    def advance(self, step: S, ctx: StepContext, txn: Transaction) -> None:
        """Move lengths and draw indices; undone by a rollback."""

    def settle(self, plan: Any, rows: Rows, host: Mapping[str, np.ndarray], outputs: StepOutputs) -> Mapping[int, str]:
        """The step has ended; `host` holds this resource's `host_outputs`. May add to `outputs`; returns failed handles
        with the reason."""
        return {}

    def publish(self, step: S, rows: Rows, plan: Any, keep: np.ndarray | None) -> None:
        """The step is routed: seal what it filled, of the rows in `keep` (bool [rows]; None: all). A later step of the
        same rows may have been planned and advanced already."""

    # data plane
    @abstractmethod
    def layer(self, index: int) -> Any:
        """The layer handle that a layer binds at load time."""

    def staging_fields(self) -> Sequence[StagingField]:
        return ()

    def drain_work(self) -> Sequence[Work]:
        """Device work queued by control-plane calls since the last submit (table rows, cleared counters); it runs in
        order before the forward."""
        return ()

    def begin_forward(self, plan: Any, staging: Mapping[str, Tensor]) -> None:
        """Point the layer handles at this step's plan and staged tensors; runs on the executor, before the forward."""

    def begin_replay(self, plan: Any, captured: Any, staging: Mapping[str, Tensor]) -> None:
        """As `begin_forward`, before the replay of a forward that was captured with the plan `captured`."""
        self.begin_forward(plan, staging)

    def end_forward(self, plan: Any) -> None:
        """The forward has succeeded: write what later steps read. Runs on the executor, inside of what is captured."""

    def end_capture(self, plan: Any, staging: Mapping[str, Tensor], memory: GraphMemory) -> None:
        """The forward has been captured with this plan: keep in it what `begin_replay` needs; and capture, in the same
        `memory`, what `draw` does behind replays."""

    def draw(self, plan: Any, allowed: AllowedTokens | None) -> None:
        """Behind a forward or a replay, and outside of what is captured: decide on what it computed. Runs on the
        executor, for each piece of a step that runs in pieces."""

    def after_forward(self, plan: Any) -> None:
        """The step's forward, or its replay, has ended: copy what a later step overwrites. Runs on the executor, once a
        step, outside of what is captured."""

    def host_outputs(self, plan: Any) -> Mapping[str, Tensor]:
        """Tensors that `settle` wants on the host, one entry per row of the step (padding is cut off); asked on the
        executor after `draw`."""
        return {}

    def narrow(self, plan: Any, begin: int, end: int) -> Any:
        """The plan for rows `begin:end` alone, when a step has to be run in pieces."""
        return plan

    def gauges(self) -> Mapping[str, float]:
        return {}
