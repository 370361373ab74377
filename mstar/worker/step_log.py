"""The last steps of a worker, for whoever asks later what ran when: always on, bounded, nothing is sent until then.

Runs on the worker's loop thread.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from mstar.communication.messages import AskSteps, StepReport
from mstar.engine.execution import Step
from mstar.worker.rid_table import RidTable

MAX_STEPS = 4096
MAX_ROWS = 1 << 16
"""Rows of all steps kept together: a report of them is some 400 kB."""


class _Part(NamedTuple):
    """`spans` int32 [rows of the step]: tokens; `begin`: of the part's own rows."""

    walk: str
    rids: list[str]
    spans: np.ndarray
    begin: int

    @property
    def num_tokens(self) -> int:
        return int(self.spans[self.begin : self.begin + len(self.rids)].sum())


class _Ended(NamedTuple):
    """Nanoseconds of the monotonic clock."""

    node: str
    composed_ns: int
    submitted_ns: int
    began_ns: int
    ended_ns: int
    num_rows: int
    parts: list[_Part]


class StepLog:
    """Keeps references to what a step has made anyway; its rows are named now, since handles are given to others."""

    def __init__(self, rids: RidTable, rank: int) -> None:
        self._rids = rids
        self._rank = rank
        self._steps: deque[_Ended] = deque()
        self._num_rows = 0

    def ended(self, step: Step) -> None:
        """Of a step that the device has ended and whose rows still have their handles."""
        event = step.event
        assert event is not None
        rids, spans = self._rids.rids, step.spans
        parts = [_Part(part.taken.key.walk, rids(part.taken.rows), spans, part.begin) for part in step.parts]
        num_rows = step.num_rows
        self._steps.append(
            _Ended(step.node, step.composed_ns, step.submitted_ns, event.began_ns, event.ended_ns, num_rows, parts)
        )
        self._num_rows += num_rows
        while self._num_rows > MAX_ROWS or len(self._steps) > MAX_STEPS:
            self._num_rows -= self._steps.popleft().num_rows

    def report(self, asked: AskSteps) -> StepReport:
        """What is kept of the time that was asked for."""
        steps = [step for step in self._steps if step.ended_ns > asked.since_ns]
        parts = [(index, part) for index, step in enumerate(steps) for part in step.parts]
        places: dict[str, int] = {}
        rows = [places.setdefault(rid, len(places)) for _, part in parts for rid in part.rids]
        return StepReport(
            ask=asked.ask,
            rank=self._rank,
            nodes=[step.node for step in steps],
            composed_ns=[step.composed_ns for step in steps],
            submitted_ns=[step.submitted_ns for step in steps],
            began_ns=[step.began_ns for step in steps],
            ended_ns=[step.ended_ns for step in steps],
            part_steps=[index for index, _ in parts],
            walks=[part.walk for _, part in parts],
            part_rows=[len(part.rids) for _, part in parts],
            part_tokens=[part.num_tokens for _, part in parts],
            rows=rows,
            rids=list(places),
        )
