"""`Step`: one forward of one node over its rows, from composition to routing.

Built by the worker's micro-scheduler, carried through the engine, read back in `check_stop` and `route`. Columns; owned
by the worker's loop thread. What the device executor does for a step hangs in `plan`, which is the engine's own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mstar.communication.messages import TokenLogprobs
from mstar.graph.protocol import LIVE_COLUMN, TakenRows

if TYPE_CHECKING:
    from mstar.engine.submodule import RowColumns
    from mstar.engine.transaction import Transaction
    from mstar.platforms.executor import DeviceEvent


class StepState(enum.Enum):
    """How far the engine has come with a step."""

    BUILT = "built"
    ARMED = "armed"
    """Admitted, planned and advanced; its transaction is open."""
    SUBMITTED = "submitted"
    DONE = "done"
    ABANDONED = "abandoned"


class Portion(NamedTuple):
    """Rows for a step that is to be built. `limits` int32 [rows]: tokens that each row may compute in it at most (None:
    all that it has to); a row computes at least one. Rows of walks that are not chunked are never cut."""

    taken: TakenRows
    limits: np.ndarray | None = None


class StepPart(NamedTuple):
    """Rows of one (node, walk); `begin:end` is their range in the step's columns."""

    taken: TakenRows
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-softmax of the raw logits, for the rows of a step that asked: `index[row]` is a row's place in the columns
    (-1: it did not ask). `logprobs` fp32 [n] of the drawn tokens; `top_ids` int32 and `top_logprobs` fp32 [n, widest],
    of which place i asked for `num_top[i]`."""

    index: np.ndarray
    num_top: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def __getitem__(self, row: int) -> TokenLogprobs | None:
        place = int(self.index[row])
        if place < 0:
            return None
        num_top = int(self.num_top[place])
        return TokenLogprobs(
            float(self.logprobs[place]),
            tuple(self.top_ids[place, :num_top].tolist()),
            tuple(self.top_logprobs[place, :num_top].tolist()),
        )


class AllowedTokens(NamedTuple):
    """Rows of a step that may draw certain tokens only. `rows` int64 [n]: their positions in the step, rising; `bits`
    int32 [n, ceil(vocab / 32)]: bit `i % 32` of word `i // 32` is set where token `i` may be drawn (bits past the
    vocabulary mean nothing)."""

    rows: np.ndarray
    bits: np.ndarray

    def narrow(self, begin: int, end: int) -> AllowedTokens:
        """Those of rows `begin:end`, counted from `begin`."""
        inside = (self.rows >= begin) & (self.rows < end)
        return AllowedTokens(self.rows[inside] - begin, self.bits[inside])


@dataclass(slots=True)
class StepOutputs:
    """`host[signal]`: numpy `[rows, ...]` views into the guarded output ring, valid until two more steps have been
    submitted. `ids[signal]`: tensor-store ids by row (int64 [rows]), or None when the value is the live column."""

    host: dict[str, np.ndarray] = field(default_factory=dict)
    ids: dict[str, np.ndarray | None] = field(default_factory=dict)
    logprobs: StepLogprobs | None = None
    """Of the rows that asked for them."""

    def ids_of(self, part: StepPart) -> dict[str, list[int]]:
        """Ids by signal for the rows of one part, as `GraphRuntime.complete` takes them."""
        size = part.end - part.begin
        return {
            signal: [LIVE_COLUMN] * size if column is None else column[part.begin : part.end].tolist()
            for signal, column in self.ids.items()
        }


@dataclass(slots=True)
class Step:
    """`handles` int64 [rows] and `spans` int32 [rows], decode-like part first. `failed`: handle → message; a step that
    `build` returns with failed rows cannot run: its rows go back, the failed ones leave, the others are built again.
    `dropped`: rows that went on from the step before and had stopped or failed in it; what this step made for them is
    thrown away.
    `unfinished` bool [rows]: rows whose run needs further steps, because it was cut or because the row's cache is being
    restored; they have drawn nothing and made no outputs. None: every row's run ends with this step.
    `part_columns[i]`: the columns of `parts[i]` alone. `spec_ids[i]` belongs to `parts[i]`; `carried`: indexes of parts
    that go on with runs of the step before."""

    node: str
    parts: tuple[StepPart, ...]
    handles: np.ndarray
    spans: np.ndarray
    columns: RowColumns
    part_columns: tuple[RowColumns, ...]
    unfinished: np.ndarray | None = None
    draws_later: bool = False
    """It is submitted without its draw, which follows."""
    state: StepState = StepState.BUILT
    spec_ids: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    txn: Transaction | None = None
    plan: Any = None
    event: DeviceEvent | None = None
    outputs: StepOutputs = field(default_factory=StepOutputs)
    failed: dict[int, str] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    error: BaseException | None = None
    composed_ns: int = 0
    submitted_ns: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.handles)

    def fail_all(self, why: str) -> None:
        self.failed.update(dict.fromkeys(self.handles.tolist(), why))

    def unfinished_in(self, part: StepPart) -> list[int]:
        """Places of unfinished rows among those of the part."""
        if self.unfinished is None:
            return []
        return self.unfinished[part.begin : part.end].nonzero()[0].tolist()

    def host(self, signal: str) -> np.ndarray:
        """Host copy of an output, `[rows, ...]`."""
        return self.outputs.host[signal]


class AdmitOutcome(NamedTuple):
    """Empty `refused`: everything is reserved. Otherwise nothing is, and these rows ran short of `resource`, by
    `missing` pages together."""

    refused: tuple[int, ...] = ()
    resource: str = ""
    missing: int = 0

    @property
    def ok(self) -> bool:
        return not self.refused
