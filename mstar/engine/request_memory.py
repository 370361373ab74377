"""`RequestMemory`: what requests hold in an engine's resources, from the time they are known until they leave.

Loop thread, host integers. Steps are the engine's; who is let in, and who has to wait, is the worker's.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar.engine.resources.base import OpenConfig, Resource
from mstar.engine.row_table import RowTable


class RequestMemory:
    """Every call covers all resources of the engine, or changes none of them."""

    def __init__(self, resources: Sequence[Resource], rows: RowTable, max_seq_len: int) -> None:
        self._resources = resources
        self._rows = rows
        self._max_seq_len = max_seq_len

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
        """A request ends, opened or only promised room. No step may hold a row of it."""
        for resource in self._resources:
            resource.close(handle)
        self._rows.close(handle)

    def reserve(self, handle: int, num_tokens: int) -> bool:
        """Promise room for `num_tokens` in every cache, or in none. `close` gives it back. More than `most_tokens` is
        never granted."""
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

    def most_tokens(self) -> int:
        """Tokens that one request could ever hold."""
        limits = [limit for resource in self._resources if (limit := resource.most_tokens()) is not None]
        return min([self._max_seq_len, *limits])
