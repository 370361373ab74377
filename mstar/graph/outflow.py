"""What leaves a worker: fills the columns of a `Routed`, and retains each id once for the outbox."""

from __future__ import annotations

from mstar.graph.protocol import (
    LIVE_COLUMN,
    NO_TENSOR,
    EdgeColumns,
    EmitColumns,
    GraphError,
    ReadyKey,
    Routed,
    StreamColumns,
)
from mstar.graph.references import References, Value


class Outflow:
    """Everything is written to `routed`, a sink of its own; `collect` moves it to a caller's."""

    __slots__ = ("_refs", "routed")

    def __init__(self, refs: References) -> None:
        self._refs = refs
        self.routed = Routed()

    def end(self, freed_to: Routed | None = None) -> None:
        """A call of the runtime is over: settle its references."""
        freed = self._refs.settle()
        if freed:
            (self.routed if freed_to is None else freed_to).freed.extend(freed)

    def collect(self, routed: Routed) -> None:
        """Move what has been written."""
        own, self.routed = self.routed, Routed()
        routed.freed += own.freed
        routed.walk_done += own.walk_done
        routed.emits += own.emits
        for peer, edges in own.edges.items():
            for to, column in zip(routed.edges.setdefault(peer, EdgeColumns([], [], [], [])), edges, strict=True):
                to += column
        for peer, items in own.streams.items():
            for to, column in zip(routed.streams.setdefault(peer, StreamColumns([], [], [], [])), items, strict=True):
                to += column
        for target, source in ((routed.stream_ends, own.stream_ends), (routed.credits, own.credits)):
            for peer, counts in source.items():
                for to, column in zip(target.setdefault(peer, ([], [], [])), counts, strict=True):
                    to += column

    def emit_column(self, key: ReadyKey, signal: str, modality: str, handles: list[int], ids: list[int]) -> None:
        """One value per row; rows without one are left out."""
        if NO_TENSOR in ids:
            handles = [handle for handle, one in zip(handles, ids, strict=True) if one != NO_TENSOR]
            ids = [one for one in ids if one != NO_TENSOR]
        if handles:
            self._refs.retain(ids)
            self.routed.emits.append(EmitColumns(key, signal, modality, list(handles), list(ids)))

    def emit(self, key: ReadyKey, signal: str, modality: str, handle: int, value: Value) -> None:
        """The value, or all values of a list."""
        values = [value] if isinstance(value, int) else [one for one in value if one != NO_TENSOR]
        if not values or values == [NO_TENSOR]:
            return
        self._refs.retain(values)
        for columns in reversed(self.routed.emits):
            if columns.key == key and columns.signal == signal and columns.modality == modality:
                columns.handles.extend([handle] * len(values))
                columns.ids.extend(values)
                return
        self.routed.emits.append(EmitColumns(key, signal, modality, [handle] * len(values), values))

    def edge_column(self, peer: int, slot: int, handles: list[int], ids: list[int]) -> None:
        self._refs.retain(ids)
        columns = self.routed.edges.setdefault(peer, EdgeColumns([], [], [], []))
        columns.handles.extend(handles)
        columns.slots.extend([slot] * len(handles))
        columns.ids.extend(ids)
        columns.counts.extend([1] * len(handles))

    def edge(self, peer: int, slot: int, handle: int, value: Value) -> None:
        values = [value] if isinstance(value, int) else value
        if LIVE_COLUMN in values:
            raise GraphError(f"a live value cannot be sent (slot {slot} of worker {peer})")
        self._refs.retain(values)
        columns = self.routed.edges.setdefault(peer, EdgeColumns([], [], [], []))
        columns.handles.append(handle)
        columns.slots.append(slot)
        columns.ids.extend(values)
        columns.counts.append(len(values))

    def stream(self, peer: int, handle: int, edge: int, tensor_id: int, tag: int) -> None:
        self._refs.retain(tensor_id)
        columns = self.routed.streams.setdefault(peer, StreamColumns([], [], [], []))
        columns.handles.append(handle)
        columns.edges.append(edge)
        columns.ids.append(tensor_id)
        columns.tags.append(tag)

    def stream_end(self, peer: int, handle: int, edge: int, total: int) -> None:
        _append(self.routed.stream_ends.setdefault(peer, ([], [], [])), handle, edge, total)

    def credit(self, peer: int, handle: int, edge: int, count: int) -> None:
        _append(self.routed.credits.setdefault(peer, ([], [], [])), handle, edge, count)


def _append(columns: tuple[list[int], list[int], list[int]], handle: int, edge: int, count: int) -> None:
    for column, value in zip(columns, (handle, edge, count), strict=True):
        column.append(value)
