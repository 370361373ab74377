"""What the front knows of the worker processes: which are up, in which incarnation, and whether they answer.

Front loop only; reads no clock of its own and sends nothing. Messages of one process may arrive in another order than
the supervisor's about it, so every fact carries the incarnation that it is true of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class WorkerState:
    """The newest incarnation of one rank. `heartbeat_at` is None until it is ready. `is_reported`: the log says that it
    is silent or hangs."""

    rank: int
    incarnation: int = -1
    is_connected: bool = False
    is_ready: bool = False
    is_lost: bool = False
    is_reported: bool = False
    refusal: str | None = None
    max_total_tokens: int = 0
    heartbeat_at: float | None = None
    step_age_s: float = 0.0
    gauges: Mapping[str, float] = field(default_factory=dict)


class WorkerTable:
    """States by rank. `watchdog_s`: longest silence, `step_timeout_s`: longest step that still count as healthy."""

    def __init__(self, ranks: Iterable[int], *, watchdog_s: float, step_timeout_s: float) -> None:
        self.states = {rank: WorkerState(rank) for rank in sorted(ranks)}
        self.watchdog_s = watchdog_s
        self.step_timeout_s = step_timeout_s
        self.num_restarts = 0

    def meet(self, rank: int, incarnation: int) -> WorkerState | None:
        """The state that a message from or about this incarnation is about, renewed if it is a newer one; None for an
        incarnation that is gone, or a rank that hosts nothing."""
        state = self.states.get(rank)
        if state is None or incarnation < state.incarnation or (incarnation == state.incarnation and state.is_lost):
            return None
        if incarnation > state.incarnation:
            if state.incarnation >= 0:
                self.num_restarts += 1
            state = self.states[rank] = WorkerState(rank, incarnation)
        return state

    def why_unhealthy(self, state: WorkerState, now: float) -> str | None:
        """What is wrong with a worker that was ready; None for one that is well or not ready yet."""
        if state.is_lost:
            return f"worker {state.rank} has ended and is being restarted"
        if state.refusal is not None:
            return state.refusal
        if state.heartbeat_at is None:
            return None
        silence_s = now - state.heartbeat_at
        if silence_s > self.watchdog_s:
            return f"worker {state.rank} has sent no heartbeat for {silence_s:.1f} s"
        if state.step_age_s > self.step_timeout_s:
            return f"worker {state.rank} has been in one step for {state.step_age_s:.0f} s"
        return None

    def why_not_ready(self, now: float, ranks: Iterable[int] | None = None) -> str | None:
        """Why no request that needs all these workers can be served now (None: those of the deployment), or None."""
        for rank in self.states if ranks is None else ranks:
            if reason := self._why_unready(self.states[rank], now):
                return reason
        return None

    def why_none_ready(self, now: float) -> str | None:
        """Why no request at all can be served now, or None."""
        reasons = [self._why_unready(state, now) for state in self.states.values()]
        return reasons[0] if all(reasons) else None

    def _why_unready(self, state: WorkerState, now: float) -> str | None:
        if reason := self.why_unhealthy(state, now):
            return reason
        return None if state.is_ready and state.is_connected else f"worker {state.rank} is starting"

    def next_deadline(self, now: float) -> float | None:
        """When the first worker that is heard of now has been silent for too long, if nothing comes before."""
        heard = [s.heartbeat_at for s in self.states.values() if s.heartbeat_at is not None and not s.is_lost]
        return min((at + self.watchdog_s for at in heard if at + self.watchdog_s > now), default=None)

    @property
    def connected(self) -> list[int]:
        """Ranks that a message reaches and that listen."""
        return [s.rank for s in self.states.values() if s.is_connected and s.is_ready and not s.is_lost]

    @property
    def max_total_tokens(self) -> int | None:
        """Most tokens (prompt and output) that one request can hold on every worker; None: no worker has a bound."""
        bounds = [state.max_total_tokens for state in self.states.values() if state.max_total_tokens > 0]
        return min(bounds) if bounds else None

    def gauge(self, name: str) -> float:
        """One gauge of all living workers, added up."""
        return sum(state.gauges.get(name, 0.0) for state in self.states.values() if not state.is_lost)

    def summed_gauges(self) -> dict[str, float]:
        """Gauges of all living workers, added up by name."""
        sums: dict[str, float] = {}
        for state in self.states.values():
            if not state.is_lost:
                for name, value in state.gauges.items():
                    sums[name] = sums.get(name, 0.0) + value
        return sums
