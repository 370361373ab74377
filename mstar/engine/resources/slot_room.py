"""`SlotRoom`: what a cache's state slots have room for, in the terms in which `CacheHoldings` speaks of its pages.

Loop thread, host integers. Slots and pages of a request are taken and come back together; each is counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar.engine.resources.cache_holdings import CacheHoldings, Preempted
from mstar.engine.resources.state_holdings import StateHoldings


class SlotRoom:
    """`holdings`: of the cache that the states go with."""

    def __init__(self, holdings: CacheHoldings, states: StateHoldings) -> None:
        self._holdings = holdings
        self._states = states

    def available(self, without: Sequence[int] = ()) -> int:
        """Slots that a request could get, or could with those of `without` preempted that can be."""
        leaving = self._holdings.leaving(without)
        return self._states.slots.num_available + sum(bool(self._states.live[handle]) for handle in leaving)

    def lacking(self, handle: int, without: Sequence[int] = ()) -> int:
        """1 where the request has no slot and could get none."""
        return int(not self._states.live[handle] and not self.available(without))

    def reclaimable(self, handle: int) -> int:
        """1 where preempting the request would give its slot."""
        return int(bool(self._states.live[handle]) and self._holdings.reclaimable(handle) > 0)

    def unused(self, handle: int) -> int:
        """As `reclaimable`, of a request that has computed nothing."""
        return int(bool(self._states.live[handle]) and self._holdings.unused(handle) > 0)

    def preempt(self, handle: int) -> Preempted:
        return self._holdings.preempt(handle)
