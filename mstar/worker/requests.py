"""The requests of one worker: what each was opened with, which walks are still to run, and columns by handle.

Runs on the worker's loop thread. A request object is touched when it arrives, changes walk or leaves, never per step;
what a step needs is in the columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mstar.communication.messages import FinishReason, OpenRequest, StartWalk
from mstar.worker.rid_table import HandleMap, RidTable


@dataclass(slots=True)
class PartitionRun:
    """Where one partition of a request is: `pending` walks are run after the current one without asking the front.
    `last`: none follows them. `limits`: loop limits given so far."""

    pending: deque[str]
    last: bool
    limits: dict[str, int]
    reason: FinishReason = "length"
    finished: bool = False
    """The node said that the partition has produced what was asked: pending walks are skipped."""


class Seniority(NamedTuple):
    """Who goes first where not all can, lower first: by priority, by arrival at the front, which are the same on all
    workers of a request, and by arrival here."""

    priority: int = 0
    arrival: int = 0
    arrival_here: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One request on this worker. `starts` holds its walks while it waits for room."""

    rid: str
    handle: int
    open: OpenRequest
    prompt_ids: np.ndarray | None
    spans_workers: bool = False
    """The front waits for `Opened` before it starts walks anywhere."""
    seniority: Seniority = field(default_factory=Seniority)
    starts: list[StartWalk] = field(default_factory=list)
    partitions: dict[str, PartitionRun] = field(default_factory=dict)
    joined: bool = False
    """It stands in the line for room, or has left it; before, it waits for its grammar, or was refused."""
    admitted: bool = False
    """It has its room."""
    opened: bool = False
    """It is open in the engine; one that is admitted and not opened was refused, and waits to be removed."""

    @property
    def unstarted(self) -> bool:
        """Other workers have not let it in yet, so it runs nothing here."""
        return self.spans_workers and not self.partitions

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def max_total_tokens(self) -> int:
        """The most tokens it can hold: the last sampled token is never cached, and is counted all the same."""
        return self.num_prompt_tokens + self.open.sampling.max_tokens


class RequestTable:
    """Requests by handle, with the columns of the loop.

    `in_steps` int32 [capacity]: steps that hold the row, enqueued or armed. `removing` bool [capacity].
    `prompt_computed` int32 [capacity]: prompt tokens before this one have been computed, or adopted. By signal, an
    int64 [capacity] of the values emitted so far.
    """

    def __init__(self, capacity: int, rids: RidTable) -> None:
        self._by_handle: HandleMap[Request] = rids.handle_map("requests")
        self._emitted: dict[str, np.ndarray] = {}
        self.in_steps = np.zeros(capacity, np.int32)
        self.prompt_computed = np.zeros(capacity, np.int32)
        self.removing = np.zeros(capacity, np.bool_)

    def put(self, request: Request) -> None:
        """A request has its handle, whose columns begin anew."""
        self._by_handle[request.handle] = request
        self.in_steps[request.handle] = 0
        self.prompt_computed[request.handle] = 0
        self.removing[request.handle] = False
        for emitted in self._emitted.values():
            emitted[request.handle] = 0

    def __getitem__(self, handle: int) -> Request:
        """
        Raises:
            UnknownHandle: no request is behind the handle.
        """
        return self._by_handle[handle]

    def order(self, handles: Sequence[int]) -> list[int] | None:
        """Positions of `handles` from the most senior on; None: all are of one priority."""
        seniority = [self._by_handle[handle].seniority for handle in handles]
        if not seniority or all(one.priority == seniority[0].priority for one in seniority):
            return None
        return sorted(range(len(handles)), key=seniority.__getitem__)

    def count_emits(self, signal: str, handles: Sequence[int]) -> None:
        """One more value of `signal` for each entry; a handle whose list of values is emitted stands there more than
        once."""
        emitted = self._emitted.get(signal)
        if emitted is None:
            emitted = self._emitted[signal] = np.zeros(self.in_steps.size, np.int64)
        emitted += np.bincount(handles, minlength=emitted.size)

    def emits(self, handle: int) -> dict[str, int]:
        """Values emitted for a request so far, by signal."""
        return {signal: int(emitted[handle]) for signal, emitted in self._emitted.items() if emitted[handle]}
