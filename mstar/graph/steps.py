"""Rows on their way through steps: taken, given back, completed.

On the worker's loop thread. Arguments are checked before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstar.graph.keys import KeyEntry, KeyTable
from mstar.graph.outflow import Outflow
from mstar.graph.passes import WalkTurns
from mstar.graph.protocol import LIVE_COLUMN, NO_TENSOR, Gate, GraphError, ReadyKey, TakenRows
from mstar.graph.ready import ReadyIndex
from mstar.graph.references import References
from mstar.graph.rows import RowState


class Steps:
    """Moves rows between ready, running and done."""

    def __init__(self, keys: KeyTable, refs: References, outflow: Outflow, ready: ReadyIndex, turns: WalkTurns) -> None:
        self._keys = keys
        self._refs = refs
        self._outflow = outflow
        self._ready = ready
        self._turns = turns

    def take(self, key: ReadyKey, handles: list[int]) -> TakenRows:
        entry = self._keys.entry(key)
        waiting = entry.queue.rows
        if len(set(handles)) != len(handles) or not all(handle in waiting for handle in handles):
            missing = sorted({handle for handle in handles if handle not in waiting})
            raise GraphError(f"{_name(key)}: rows {missing or handles} are not ready (or listed twice)")
        bit = entry.node.bit
        rows = [entry.rows[handle] for handle in handles]
        for handle, row in zip(handles, rows, strict=True):
            del waiting[handle]
            row.ready ^= bit
            row.running |= bit
        return self._keys.taken(entry, handles, rows, following=False)

    def give_back(self, key: ReadyKey, handles: list[int]) -> None:
        entry = self._keys.entry(key)
        node = entry.node
        rows = self._running(entry, handles)
        for row in rows:
            if row.gates & Gate.FAILED and not row.running & node.bit:
                continue
            if row.sequences[node.index] < 0:
                raise GraphError(f"{_name(key)}: row {row.handle} came from a speculation; settle that instead")
        for row in rows:
            if not row.running & node.bit:
                continue
            row.running ^= node.bit
            if node.streams:
                self._turns.desk.give_back(row, node)
            self._ready.put_back(row, node)

    def carriable(self, key: ReadyKey, handles: Sequence[int]) -> list[int]:
        entry = self._keys.entry(key)
        bit, program, table = entry.node.bit, entry.program, entry.rows
        return [
            handle
            for handle in handles
            if (row := table.get(handle)) is not None and row.running & bit and not row.gates and row.program is program
        ]

    def complete(self, key: ReadyKey, handles: list[int], ids: Mapping[str, Sequence[int]]) -> None:
        entry = self._keys.entry(key)
        node = entry.node
        rows = self._running(entry, handles)
        columns = self._output_columns(entry, rows, ids)
        if any(not row.running & node.bit for row in rows):
            handles, rows, columns = self._without_failed(entry, handles, rows, columns)
        machine, desk = self._turns.machine, self._turns.desk
        for route, column in zip(node.routes, columns, strict=True):
            if column.count(LIVE_COLUMN) != len(column):
                self._refs.pass_through(column)
            for modality in route.emits:
                self._outflow.emit_column(key, route.signal, modality, handles, column)
            for peer, slot in route.remotes:
                self._outflow.edge_column(peer, slot, handles, column)
            for op in route.streams:
                for row, one in zip(rows, column, strict=True):
                    if one != NO_TENSOR and desk.produce(row.request, op, one):
                        self._turns.wake(row.request, op.edge)
            for op in route.persists:
                for row, one in zip(rows, column, strict=True):
                    machine.persist(row, op, one)
        rest = rows if entry.short < 0 or not entry.live else self._go_on(entry, rows)
        if rest:
            bit = node.bit
            chosen = zip(rows, zip(*columns, strict=True), strict=True) if columns else [(row, ()) for row in rows]
            if rest is not rows:
                kept = set(rest)
                chosen = [(row, values) for row, values in chosen if row in kept]
            for row, values in chosen:
                row.running ^= bit
                machine.finish(row, node, values)

    def _go_on(self, entry: KeyEntry, rows: list[RowState]) -> list[RowState]:
        """The short path: a node alone in its loop, renewed by a live value. Returns the rows that need the long one:
        those whose loop ends, and those whose first value was a tensor."""
        node, position, scope = entry.node, entry.short, entry.node.scope
        bit = node.bit
        rest: list[RowState] = []
        for row in rows:
            iteration = row.iterations[scope] + 1
            if row.stopping or iteration >= row.limits[scope] or row.ids[position] != LIVE_COLUMN:
                rest.append(row)
                continue
            row.iterations[scope] = iteration
            row.running ^= bit
            if not row.armed & bit:
                self._ready.add(row, node)
        return rest

    def _running(self, entry: KeyEntry, handles: list[int]) -> list[RowState]:
        """Raises:
        GraphError: a row is not in a step of the key. A failed row passes, without its running bit.
        """
        bit, program, table = entry.node.bit, entry.program, entry.rows
        try:
            rows = [table[handle] for handle in handles]
        except KeyError as error:
            raise GraphError(f"{_name(entry.key)}: handle {error.args[0]} is unknown") from None
        if len(set(handles)) != len(handles):
            raise GraphError(f"{_name(entry.key)}: a row is listed twice in {handles}")
        idle = [row for row in rows if not row.running & bit or row.program is not program]
        for row in idle:
            if not row.gates & Gate.FAILED:
                raise GraphError(f"{_name(entry.key)}: row {row.handle} is in no step; it was completed already")
        return rows

    def _output_columns(
        self, entry: KeyEntry, rows: list[RowState], ids: Mapping[str, Sequence[int]]
    ) -> list[list[int]]:
        """A column per output of the node, checked. Learns whether its loop-backs are live."""
        node, count = entry.node, len(rows)
        columns: list[list[int]] = []
        found = 0
        for route in node.routes:
            given = ids.get(route.signal)
            if given is None:
                columns.append([NO_TENSOR] * count)
                continue
            found += 1
            column = given if type(given) is list else [int(one) for one in given]
            if len(column) != count:
                raise GraphError(f"{_name(entry.key)}: output {route.signal!r} has {len(column)} ids for {count} rows")
            if not route.live_ok and LIVE_COLUMN in column:
                raise GraphError(
                    f"{_name(entry.key)}: output {route.signal!r} is live, but another node reads it; put a tensor"
                )
            columns.append(column)
        if found != len(ids):
            known = [route.signal for route in node.routes]
            raise GraphError(
                f"{_name(entry.key)}: outputs {sorted(set(ids) - set(known))} are not declared ({known} are)"
            )
        if node.self_signals:
            own = [
                column for route, column in zip(node.routes, columns, strict=True) if route.signal in node.self_signals
            ]
            live = all(column.count(LIVE_COLUMN) == count for column in own)
            if not live:
                for i, row in enumerate(rows):
                    if row.armed & node.bit and any(column[i] != LIVE_COLUMN for column in own):
                        raise GraphError(
                            f"{_name(entry.key)}: row {row.handle} was speculated on, but its value is not live"
                        )
            entry.live = live
        return columns

    def _without_failed(
        self, entry: KeyEntry, handles: list[int], rows: list[RowState], columns: list[list[int]]
    ) -> tuple[list[int], list[RowState], list[list[int]]]:
        """Rows that failed in another step meanwhile are dropped; what they made is freed."""
        kept = [i for i, row in enumerate(rows) if row.running & entry.node.bit]
        for column in columns:
            self._refs.pass_through([one for i, one in enumerate(column) if i not in kept])
        return (
            [handles[i] for i in kept],
            [rows[i] for i in kept],
            [[column[i] for i in kept] for column in columns],
        )


def _name(key: ReadyKey) -> str:
    return f"{key.node!r} in walk {key.walk!r}"
