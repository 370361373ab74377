"""What nodes of generated graphs compute: values that depend on everything a node can see.

Pure functions of names and values, shared by the reference interpreter and the simulated workers, so that the two can
be compared. Values are ints; an absent value is None.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Plain = int | None | list[int]


@dataclass(frozen=True)
class Behaviour:
    """`maybe_absent`: signals that a node sometimes does not make. `stop_odds`: one in so many runs stops a loop around
    the node (0: none does)."""

    maybe_absent: frozenset[str] = frozenset()
    stop_odds: int = 0

    def run(
        self, node: str, walk: str, signals: Sequence[str], inputs: Mapping[str, Plain], iteration: int, final: bool
    ) -> dict[str, int | None]:
        seen = (node, walk, iteration, final, sorted((name, as_tuple(value)) for name, value in inputs.items()))
        return {name: self._value(seen, name) for name in signals}

    def stops(self, node: str, walk: str, outputs: Mapping[str, int | None], loops: Sequence[str]) -> list[str]:
        """Loops around the node (given innermost first) that end with this iteration."""
        if not self.stop_odds or not loops:
            return []
        draw = _digest((node, walk, sorted(outputs.items()), "stop"))
        return [loop for i, loop in enumerate(loops) if draw >> (8 * i) & 255 < 256 // self.stop_odds]

    def _value(self, seen: object, name: str) -> int | None:
        value = _digest((seen, name))
        return None if name in self.maybe_absent and value % 3 == 0 else value


def as_tuple(value: Plain) -> tuple[int, ...]:
    """A value as the ids it consists of: an absent one and an empty list are the same, so are a value and a list of
    it."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _digest(seen: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(seen).encode(), digest_size=6).digest(), "big")
