"""How many choices may be under way, and when a request that finds no place should come back. Front loop only; pure
decisions over numbers.

Workers run up to `max_rows` choices and know up to `max_queue` more, which wait. A choice has its place from the moment
its request is taken on, so one whose prompt is still being prepared counts. Where caches are short of room, fewer than
`max_rows` run; the workers report how many wait, and those too are at most `max_queue`, as far as reports are new.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from mstar.conductor.events import Failure, RefusedError

LEAST_RETRY_AFTER_S = 1
MOST_RETRY_AFTER_S = 60
WINDOW = 64
"""Last ends of choices that the rate is taken from."""


class Load(NamedTuple):
    """Choices now. `num_live`: taken on and not ended. `num_silent`: those that have emitted nothing yet. `num_queued`:
    those that wait for room, as the workers reported last."""

    num_live: int
    num_silent: int
    num_queued: int


class QueueBound:
    """See the module docstring. Times are of the conductor's clock, in seconds."""

    def __init__(self, max_rows: int, max_queue: int) -> None:
        self.max_rows = max_rows
        self.max_queue = max_queue
        self._ends: deque[float] = deque(maxlen=WINDOW)
        self._busy_since = 0.0

    @property
    def most(self) -> int:
        """Choices that may be live at once."""
        return self.max_rows + self.max_queue

    def admit(self, num_choices: int, load: Load, now: float) -> None:
        """Whether so many more choices have a place.

        Raises:
            RefusedError: 429, with the time in which as many as are in the way will end, at the rate of the last ends.
        """
        if not load.num_live:
            self._ends.clear()
            self._busy_since = now
        excess = load.num_live + num_choices - self.most
        # A report may be older than the first token of one that it counts.
        if num_queued := min(load.num_queued, load.num_silent):
            excess = max(excess, num_queued + num_choices - self.max_queue)
        if excess > 0:
            num_waiting = max(num_queued, load.num_live - self.max_rows)
            message = f"{num_waiting} requests wait already, at most {self.max_queue} may. Try again later."
            raise RefusedError(Failure(429, "queue_full", message, retry_after_s=self._retry_after_s(excess, now)))

    def ended(self, num_choices: int, now: float) -> None:
        self._ends.extend([now] * min(num_choices, WINDOW))

    def _retry_after_s(self, num_choices: int, now: float) -> int:
        """Whole seconds in which so many choices will end; the least while none has ended."""
        if not self._ends:
            return LEAST_RETRY_AFTER_S
        since = self._ends[0] if len(self._ends) == WINDOW else self._busy_since
        needs_s = num_choices * (now - since) / len(self._ends)
        return min(MOST_RETRY_AFTER_S, max(LEAST_RETRY_AFTER_S, math.ceil(needs_s)))
