"""What workers and the supervisor say about processes: who is up, ready, silent or gone. Front loop only.

Owns the watchdog timer. Requests are not its business: a rank that can no longer be relied on is handed to `fail_rank`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from mstar import __version__
from mstar.communication.address import peer_name
from mstar.communication.bus import Bus
from mstar.communication.messages import Heartbeat, Hello, PeerLost, PeerUp, Ready, ToFront
from mstar.communication.wire import why_refused
from mstar.conductor.workers import WorkerState, WorkerTable

logger = logging.getLogger(__name__)
SLACK_S = 0.01


class WorkerWatch:
    """`on_ready` is called each time that the last missing worker becomes ready. `after_alarm` is called when the
    watchdog has failed ranks, outside of any pass over the inbox."""

    def __init__(
        self,
        *,
        table: WorkerTable,
        bus: Bus[ToFront],
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        fail_rank: Callable[[int, str], None],
        after_alarm: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self.table = table
        self._bus = bus
        self._loop = loop
        self._clock = clock
        self._fail_rank = fail_rank
        self._after_alarm = after_alarm
        self._on_ready = on_ready
        self._timer: asyncio.TimerHandle | None = None

    def hello(self, message: Hello) -> None:
        state = self._meet(message.rank, message.incarnation)
        if state is not None:
            state.refusal = why_refused(message, __version__)
            if state.refusal is not None:
                logger.error("%s", state.refusal)

    def ready(self, message: Ready) -> None:
        state = self._meet(message.rank, message.incarnation)
        if state is not None:
            if message.incarnation > 0 and not state.is_ready:
                logger.info("worker %d is ready again, after restart %d", message.rank, message.incarnation)
            state.is_ready = True
            state.max_total_tokens = message.max_total_tokens
            state.heartbeat_at = self._clock()
            self._tell_if_ready()
            self._arm()

    def heartbeat(self, message: Heartbeat) -> None:
        state = self._meet(message.rank, message.incarnation)
        if state is None:
            return
        state.gauges = message.gauges
        state.step_age_s = message.step_age_s
        if not state.is_ready:
            return
        state.heartbeat_at = self._clock()
        if self._timer is None:
            self._arm()
        if reason := self.table.why_unhealthy(state, state.heartbeat_at):
            self._fail_unhealthy(state, reason)
        elif state.is_reported:
            state.is_reported = False
            logger.info("worker %d is well again", message.rank)

    def peer_up(self, message: PeerUp) -> None:
        state = self._meet(message.rank, message.incarnation)
        if state is not None:
            self._bus.connect(peer_name(message.rank), message.address)
            state.is_connected = True
            self._tell_if_ready()

    def peer_lost(self, message: PeerLost) -> None:
        state = self._meet(message.rank, message.incarnation)
        if state is not None:
            state.is_lost = True
            self._bus.disconnect(peer_name(message.rank))
            self._fail_rank(message.rank, f"worker {message.rank} has ended: {message.detail}")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        """For the moment at which the first worker would be silent for too long; heartbeats do not move the timer,
        which looks again when it fires."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        deadline = self.table.next_deadline(now)
        if deadline is not None:
            self._timer = self._loop.call_later(deadline - now + SLACK_S, self._alarm)

    def _alarm(self) -> None:
        self._timer = None
        now = self._clock()
        for state in self.table.states.values():
            if reason := self.table.why_unhealthy(state, now):
                self._fail_unhealthy(state, reason)
        self._after_alarm()
        self._arm()

    def _fail_unhealthy(self, state: WorkerState, reason: str) -> None:
        """The log hears of it once, and not of what it has been told already: a loss or a refusal."""
        if not (state.is_reported or state.is_lost or state.refusal is not None):
            state.is_reported = True
            logger.warning("%s; its requests fail until it is well", reason)
        self._fail_rank(state.rank, reason)

    def _tell_if_ready(self) -> None:
        if self.table.why_not_ready(self._clock()) is None:
            self._on_ready()

    def _meet(self, rank: int, incarnation: int) -> WorkerState | None:
        known = self.table.states.get(rank)
        state = self.table.meet(rank, incarnation)
        if state is not known and known is not None and known.incarnation >= 0 and state is not None:
            self._fail_rank(rank, f"worker {rank} was restarted")
        return state
