"""Asks workers for their last steps and waits for the answers, for as long as they may take. Front loop only."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from mstar.communication.address import peer_name
from mstar.communication.bus import Bus
from mstar.communication.messages import AskSteps, StepReport, ToFront

ANSWER_S = 2.0
"""A worker answers between two steps, or does not while one is stuck."""


class StepReports:
    """See the module docstring."""

    def __init__(self, bus: Bus[ToFront]) -> None:
        self._bus = bus
        self._numbers = itertools.count()
        self._asked: dict[tuple[int, int], asyncio.Future[StepReport]] = {}

    async def ask(self, ranks: Iterable[int], since_ns: int) -> dict[int, StepReport]:
        """Reports by rank, of those that answered in time."""
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        asked = {rank: loop.create_future() for rank in ranks}
        for rank, future in asked.items():
            self._asked[number, rank] = future
            self._bus.send(peer_name(rank), (AskSteps(ask=number, since_ns=since_ns),))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=ANSWER_S)
            return {rank: future.result() for rank, future in asked.items() if future.done()}
        finally:
            for rank in asked:
                del self._asked[number, rank]

    def arrived(self, report: StepReport) -> None:
        future = self._asked.get((report.ask, report.rank))
        if future is not None and not future.done():
            future.set_result(report)
