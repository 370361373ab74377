"""`Turns`: whose turn it is among the keys of a worker, and how long a node's rows have waited for other nodes.

Loop thread; arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterable

from mstar.graph.protocol import ReadyKey


class Turns:
    """Who was served longest ago comes first."""

    def __init__(self) -> None:
        self._served: dict[ReadyKey, int] = {}
        self._turn = 0
        self._seconds: dict[str, float] = {}
        self._device_s = 0.0
        self._device_s_after: dict[str, float] = {}

    def in_order(self, keys: Iterable[ReadyKey]) -> list[ReadyKey]:
        return sorted(keys, key=lambda key: (self._served.get(key, -1), key))

    def served(self, node: str, keys: Iterable[ReadyKey]) -> None:
        """A step of these keys of `node` was built."""
        self._turn += 1
        self._served.update(dict.fromkeys(keys, self._turn))
        self._device_s += self._seconds.get(node, 0.0)
        self._device_s_after[node] = self._device_s

    def ended(self, node: str, seconds: float) -> None:
        """So long did a step of `node` run: about what its next one will."""
        self._seconds[node] = seconds

    def waited_s(self, node: str) -> float:
        """How long the steps of other nodes run that were built since the last of `node`, as far as it can be foretold:
        the last of them may not have ended."""
        return self._device_s - self._device_s_after.get(node, self._device_s)
