"""`Transaction`: the undo log of one step. Loop thread, host only; knows nothing of resources."""

from __future__ import annotations

from collections.abc import Callable


class Transaction:
    """Undo log of one step's control-plane changes: `undo(f)` registers, `rollback` runs them newest first."""

    __slots__ = ("_undo", "open")

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.open = True

    def undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def commit(self) -> None:
        self._close()
        self._undo.clear()

    def rollback(self) -> None:
        self._close()
        while self._undo:
            self._undo.pop()()

    def _close(self) -> None:
        if not self.open:
            raise RuntimeError("a transaction is closed exactly once")
        self.open = False
