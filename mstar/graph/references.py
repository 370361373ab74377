"""Reference counting of tensor ids in batches: retains before releases, each at most once per call of the runtime."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.graph.protocol import TensorBooks

Value = int | list[int]
"""What an input holds: one id, or a list of ids. `NO_TENSOR` and `LIVE_COLUMN` are never counted."""


class References:
    """Collects what a call retains and releases; `settle` tells the books."""

    __slots__ = ("_books", "_retained", "released")

    def __init__(self, books: TensorBooks) -> None:
        self._books = books
        self._retained: list[int] = []
        self.released: list[int] = []

    def retain(self, value: Value) -> None:
        if type(value) is int:
            if value > 0:
                self._retained.append(value)
        else:
            self._retained.extend([one for one in value if one > 0])  # type: ignore[union-attr]

    def release(self, value: Value) -> None:
        if type(value) is int:
            if value > 0:
                self.released.append(value)
        else:
            self.released.extend([one for one in value if one > 0])  # type: ignore[union-attr]

    def pass_through(self, ids: Sequence[int]) -> None:
        """Ids that live at least until the call ends; who wants them longer retains them."""
        counted = [one for one in ids if one > 0]
        self._retained += counted
        self.released += counted

    def settle(self) -> list[int]:
        """Returns the ids whose last reference went."""
        if self._retained:
            self._books.retain(self._retained)
            self._retained = []
        if not self.released:
            return []
        released, self.released = self.released, []
        return self._books.release(released)
