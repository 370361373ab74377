"""`RequestMemory`: what requests hold in an engine's resources, from the time they are known until they leave.

Loop thread, host integers. Steps are the engine's; who is let in, who has to wait and whose pages are taken is the
worker's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstar.engine.resources.base import OpenConfig, Resource
from mstar.engine.resources.cache_holdings import CacheHoldings, Preempted
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.slot_room import SlotRoom
from mstar.engine.row_table import RowTable


class RequestMemory:
    """A request is introduced, reserved, opened and closed, in this order. Every call covers all resources of the
    engine, or changes none of them; those that name a resource speak of the pages of that cache alone, or of the slots
    of the states that go with one: `grows` says which."""

    def __init__(
        self, resources: Sequence[Resource], caches: Mapping[str, PagedKV], rows: RowTable, max_seq_len: int
    ) -> None:
        """`caches`: the cache of each node that has one."""
        self._resources = resources
        self._holdings = {resource.key: resource.holdings for resource in resources if isinstance(resource, PagedKV)}
        self._rooms: dict[str, CacheHoldings | SlotRoom] = dict(self._holdings)
        self._together: dict[str, tuple[str, ...]] = {}
        for key, holdings in self._holdings.items():
            if (states := holdings.states) is not None:
                self._rooms[states.key] = SlotRoom(holdings, states)
                self._together[key] = self._together[states.key] = (key, states.key)
        self._node_holdings = {node: cache.holdings for node, cache in caches.items()}
        self._rows = rows
        self._introduced: dict[int, OpenConfig] = {}
        limits = [limit for resource in resources if (limit := resource.most_tokens()) is not None]
        self._most_tokens = min([max_seq_len, *limits])

    # a request

    def introduce(self, handle: int, config: OpenConfig) -> None:
        """A request is known, and waits for its room: what its prompt may share with others is worked out, once."""
        if handle in self._introduced:
            raise RuntimeError(f"handle {handle} is introduced twice")
        for resource in self._resources:
            resource.introduce(handle, config)
        self._introduced[handle] = config

    def reserve(self, handle: int) -> bool:
        """Promise an introduced request its room in every cache; what it may reuse of earlier prompts is its own from
        now on. False: not now, and nothing has changed. One that needs more than `most_tokens` is never granted."""
        if self._introduced[handle].max_total_tokens > self._most_tokens:
            return False
        promised: list[Resource] = []
        for resource in self._resources:
            if not resource.reserve(handle):
                for earlier in promised:
                    earlier.withdraw(handle)
                return False
            promised.append(resource)
        return True

    def open(self, handle: int) -> None:
        """An introduced request begins. Atomic: what raises leaves nothing open, and room promised before stays
        promised. Without `reserve` it counts on no room.

        Raises:
            ValueError: a resource cannot serve the request; the message is meant for the client.
        """
        if self._rows.is_open[handle]:
            raise RuntimeError(f"handle {handle} is open")
        config = self._introduced[handle]
        opened: list[Resource] = []
        try:
            for resource in self._resources:
                resource.open(handle, config)
                opened.append(resource)
        except ValueError:
            for resource in opened:
                resource.cancel_open(handle)
            raise
        self._rows.open(handle, config)

    def close(self, handle: int) -> None:
        """A request ends, however far it has come. No step may hold a row of it."""
        for resource in self._resources:
            resource.close(handle)
        self._rows.close(handle)
        self._introduced.pop(handle, None)

    def most_tokens(self) -> int:
        """Tokens that one request could ever hold."""
        return self._most_tokens

    def num_cached_tokens(self, handle: int) -> int:
        """Prompt tokens that were adopted and never computed, in the cache that adopted most."""
        return max((int(holdings.num_adopted[handle]) for holdings in self._holdings.values()), default=0)

    def num_computed_tokens(self, handle: int, num_prompt_tokens: int) -> int:
        """Prompt tokens that a cache did not have; 0 where there is none to ask."""
        return num_prompt_tokens - self.num_cached_tokens(handle) if self._holdings else 0

    def extend_prefix(self, node: str, handle: int) -> int:
        """Before a chunk of a row that no step holds: adopt what others have sealed meanwhile, right behind the row's
        length. Returns the tokens gained."""
        holdings = self._node_holdings.get(node)
        return 0 if holdings is None else holdings.extend(handle)

    # room

    def available(self, resource: str, without: Sequence[int] = ()) -> int:
        """Pages of a cache that are neither owned by a request nor promised to one, or slots that are no request's; if
        the requests `without` were preempted, where they can be."""
        return self._rooms[resource].available(without)

    def grows(self, resource: str) -> bool:
        """Whether a request may come to need more of it than it began with: pages, not slots."""
        return resource in self._holdings

    def together(self, resource: str) -> Sequence[str]:
        """Resources that a request loses together with this one, itself included."""
        return self._together.get(resource, (resource,))

    def lacking(self, handle: int, without: Sequence[int] = ()) -> dict[str, int]:
        """Pages and slots by resource that must become available before an introduced request gets its room; if the
        requests `without` were preempted, where they can be."""
        lacking = {key: room.lacking(handle, without) for key, room in self._rooms.items()}
        return {key: count for key, count in lacking.items() if count}

    def reclaimable(self, handle: int, resource: str) -> int:
        """By how much `available` would grow if the request were preempted; 0: it cannot be preempted, or nothing would
        be gained."""
        return self._rooms[resource].reclaimable(handle)

    def unused(self, handle: int, resource: str) -> int:
        """As `reclaimable`, of a request that has computed nothing there, whether or not its nodes could compute it
        again."""
        return self._rooms[resource].unused(handle)

    def preempt(self, handle: int, resource: str) -> Preempted:
        """Take a request's pages of one cache away, and its state with them; they are free at once. No step may hold a
        row of it.

        Raises:
            RuntimeError: it cannot be preempted there.
        """
        return self._rooms[resource].preempt(handle)

    def resume(self, handle: int) -> bool:
        """Bring back all that was preempted: reloaded, adopted, or with a target to compute up to and the room for it.
        False: no room now, and nothing has changed."""
        if not all(holdings.can_resume(handle) for holdings in self._holdings.values()):
            return False
        for holdings in self._holdings.values():
            holdings.resume(handle)
        return True

    def is_preempted(self, handle: int) -> bool:
        return any(holdings.is_preempted(handle) for holdings in self._holdings.values())

    def gauges(self) -> dict[str, float]:
        """Totals over all caches: counters in Prometheus names."""
        caches: list[CacheHoldings] = list(self._holdings.values())
        pools = [holdings.states for holdings in caches if holdings.states is not None]
        evictions = {
            "cached": sum(holdings.arena.num_evicted for holdings in caches),
            "offload": sum(holdings.num_preempted["offload"] for holdings in caches),
            "recompute": sum(holdings.num_preempted["recompute"] for holdings in caches),
        }
        if pools:
            evictions["snapshot"] = sum(pool.slots.num_evicted for pool in pools)
        return {
            "mstar_prefix_hit_tokens_total": float(sum(holdings.num_adopted_total for holdings in caches)),
            **{f'mstar_evictions_total{{kind="{kind}"}}': float(count) for kind, count in evictions.items()},
        }
