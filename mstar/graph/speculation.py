"""Speculation: the next step of rows whose present step still runs.

On the worker's loop thread. A row is a target when nothing but a live value of the step in flight is missing for its
next iteration. An armed row is neither made ready by that step's routing, nor running before its speculation is
settled.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar.graph.keys import KeyEntry, KeyTable
from mstar.graph.passes import WalkTurns
from mstar.graph.protocol import GraphError, ReadyKey, SpecTaken, SpecTarget
from mstar.graph.rows import RowState


class Speculations:
    """Those that are armed, by id."""

    def __init__(self, keys: KeyTable, turns: WalkTurns) -> None:
        self._keys = keys
        self._turns = turns
        self._armed: dict[int, tuple[KeyEntry, list[int]]] = {}
        self._next_id = 1

    def targets(self, key: ReadyKey, handles: Sequence[int]) -> list[SpecTarget]:
        entry = self._keys.entry(key)
        if not entry.speculates or not entry.live:
            return []
        found = self._targets(entry, handles)
        return [SpecTarget(key, found)] if found else []

    def prepare(self, key: ReadyKey, handles: list[int]) -> SpecTaken:
        entry = self._keys.entry(key)
        if not handles or not entry.speculates or not entry.live or len(set(handles)) != len(handles):
            raise GraphError(f"{key.node!r} in walk {key.walk!r} is not speculated on with rows {handles}")
        if len(self._targets(entry, handles)) != len(handles):
            others = sorted(set(handles) - set(self._targets(entry, handles)))
            raise GraphError(f"{key.node!r} in walk {key.walk!r}: rows {others} are no targets of a speculation")
        bit = entry.node.bit
        rows = [entry.rows[handle] for handle in handles]
        for row in rows:
            row.armed |= bit
        spec_id = self._next_id
        self._next_id += 1
        self._armed[spec_id] = (entry, handles)
        return SpecTaken(spec_id, self._keys.taken(entry, handles, rows, following=True))

    def going(self, spec_id: int) -> list[int]:
        """The rows that the routing of the step before has carried into the iteration they are armed for."""
        entry, armed = self._find(spec_id)
        return self._going(entry, armed)

    def settle(self, spec_id: int, keep: Sequence[int]) -> None:
        entry, armed = self._find(spec_id)
        node, bit, table = entry.node, entry.node.bit, entry.rows
        kept = set(keep)
        if kept and (stray := kept.difference(self._going(entry, armed))):
            raise GraphError(
                f"speculation {spec_id} cannot keep the rows {sorted(stray)}: they are not armed, the step before is "
                "not routed, or their loop has ended"
            )
        del self._armed[spec_id]
        index = node.index
        for handle in kept:
            row = table[handle]
            row.armed ^= bit
            row.running |= bit
            row.sequences[index] = -1
        if len(kept) < len(armed):
            for handle in armed:
                if handle not in kept:
                    self._disarm(entry, table.get(handle))

    @staticmethod
    def _going(entry: KeyEntry, handles: list[int]) -> list[int]:
        """Those that are armed and neither wait for the step before nor have come to the end of their loop. In its
        first iteration, a loop has ended and was begun anew by a loop around it."""
        bit, scope, table = entry.node.bit, entry.node.scope, entry.rows
        return [
            handle
            for handle in handles
            if (row := table.get(handle)) is not None
            and row.armed & bit
            and not (row.running | row.done) & bit
            and row.iterations[scope] > 0
        ]

    def _find(self, spec_id: int) -> tuple[KeyEntry, list[int]]:
        found = self._armed.get(spec_id)
        if found is None:
            raise GraphError(f"speculation {spec_id} is unknown or settled already")
        return found

    def _disarm(self, entry: KeyEntry, row: RowState | None) -> None:
        """The row is not run ahead: its chunks go back, and it is ready if the step before it has been routed."""
        node = entry.node
        if row is None or not row.armed & node.bit:
            return
        row.armed ^= node.bit
        if node.streams:
            self._turns.desk.give_back(row, node)
        if row.active:
            self._turns.machine.try_ready(row, node)
        else:
            self._turns.settle(row)

    def _targets(self, entry: KeyEntry, handles: Sequence[int]) -> list[int]:
        node, loop, program, table = entry.node, entry.loop, entry.program, entry.rows
        assert loop is not None  # a node outside a loop does not speculate
        bit, scope, ends = node.bit, node.scope, loop.bit
        simple = entry.sole and not node.spec_need and not node.streams
        found: list[int] = []
        for handle in handles:
            row = table.get(handle)
            if (
                row is None
                or not row.running & bit
                or row.gates
                or row.armed & bit
                or row.stopping & ends
                or row.iterations[scope] + 1 >= row.limits[scope]
                or row.program is not program
            ):
                continue
            if simple or (
                row.filled & node.spec_need == node.spec_need
                and (row.done | bit) & loop.members == loop.members
                and (not node.streams or self._turns.desk.chunks_ready(row, node))
            ):
                found.append(handle)
        return found
