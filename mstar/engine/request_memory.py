"""`RequestMemory`: what requests hold in an engine's resources, from the time they are known until they leave.

Loop thread, host integers. Steps are the engine's; who is let in, who has to wait and whose pages are taken is the
worker's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from mstar.engine.resources.base import OpenConfig, Resource
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.row_table import RowTable

Preempted = Literal["offload", "recompute"]
"""Where a preempted request's cache has gone: to the host's memory, or nowhere, to be computed again."""


class RequestMemory:
    """A request is introduced, reserved, opened and closed, in this order. Every call covers all resources of the
    engine, or changes none of them; those that name a resource speak of that cache alone."""

    def __init__(
        self, resources: Sequence[Resource], caches: Mapping[str, PagedKV], rows: RowTable, max_seq_len: int
    ) -> None:
        """`caches`: the cache of each node that has one."""
        self._resources = resources
        self._caches = {resource.key: resource for resource in resources if isinstance(resource, PagedKV)}
        self._cache_of = caches
        self._rows = rows
        self._max_seq_len = max_seq_len
        self._introduced: dict[int, OpenConfig] = {}

    # a request

    def introduce(self, handle: int, config: OpenConfig) -> None:
        """A request is known, and waits for its room."""
        self._introduced[handle] = config

    def reserve(self, handle: int) -> bool:
        """Promise an introduced request its room in every cache; what it may reuse of earlier prompts is its own from
        now on. False: not now, and nothing has changed. One that needs more than `most_tokens` is never granted."""
        num_tokens = self._introduced[handle].max_total_tokens
        if num_tokens > self.most_tokens():
            return False
        promised: list[Resource] = []
        for resource in self._resources:
            if not resource.reserve(handle, num_tokens):
                for earlier in promised:
                    earlier.reserve(handle, 0)
                return False
            promised.append(resource)
        return True

    def open(self, handle: int, config: OpenConfig) -> None:
        """A request begins. Atomic: what raises leaves nothing open, and room promised before stays promised.

        Raises:
            ValueError: a resource cannot serve the request; the message is meant for the client.
        """
        if self._rows.is_open[handle]:
            raise RuntimeError(f"handle {handle} is open")
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
        limits = [limit for resource in self._resources if (limit := resource.most_tokens()) is not None]
        return min([self._max_seq_len, *limits])

    def num_cached_tokens(self, handle: int) -> int:
        """Prompt tokens that were adopted instead of computed, in the cache that adopted most."""
        return 0

    def extend_prefix(self, node: str, handle: int) -> int:
        """Before a chunk of a row that no step holds: adopt what others have sealed meanwhile, right behind the row's
        length. Returns the tokens gained."""
        return 0

    # room

    def available(self, resource: str) -> int:
        """Pages of a cache that are neither owned by a request nor promised to one."""
        return self._caches[resource].arena.num_unpromised

    def reclaimable(self, handle: int, resource: str) -> int:
        """By how much `available` would grow if the request were preempted; 0: it cannot be preempted."""
        return 0

    def preempt(self, handle: int, resource: str) -> Preempted:
        """Take a request's pages of one cache away; they are free at once. No step may hold a row of it.

        Raises:
            RuntimeError: it cannot be preempted there.
        """
        raise RuntimeError(f"handle {handle} cannot be preempted in {resource!r}")

    def resume(self, handle: int) -> bool:
        """Bring back all that was preempted: reloaded, adopted, or with a target to compute up to and the room for it.
        False: no room now, and nothing has changed."""
        return True

    def is_preempted(self, handle: int) -> bool:
        return False
