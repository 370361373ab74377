"""Values that reached this worker before their request had started a walk here.

A request is opened on all its workers before any starts, so its handle is known; the front's `StartWalk` and a peer's
frame still race. Runs on the worker's loop thread.
"""

from __future__ import annotations

from typing import NamedTuple

from mstar.communication.tensor_store import TensorStore
from mstar.graph.protocol import NO_TENSOR, Cols, GraphRuntime, StreamColumns
from mstar.worker.rid_table import HandleMap, RidTable


class _EdgeValue(NamedTuple):
    slot: int
    ids: tuple[int, ...]


class _StreamItem(NamedTuple):
    edge: int
    tensor_id: int
    tag: int


class _StreamTotal(NamedTuple):
    edge: int
    total: int


_Parked = _EdgeValue | _StreamItem | _StreamTotal


class Parking:
    """Delivers to the graph runtime what it takes, and keeps the rest by handle, in order. Tensors still parked for a
    request when its handle is released leave the store."""

    def __init__(self, graph: GraphRuntime, rids: RidTable, store: TensorStore) -> None:
        self._graph = graph
        self._store = store
        self._parked: HandleMap[list[_Parked]] = rids.handle_map("parked values", self._free)

    def __len__(self) -> int:
        """Requests for which something is parked."""
        return len(self._parked)

    def edges(self, block: Cols) -> None:
        """Values of edges, for requests that may not have started a walk here."""
        counts = block.counts if block.counts is not None else [1] * len(block.slots)
        refused = set(self._graph.ingest(block))
        if not refused:
            return
        start = 0
        for index, count in enumerate(counts):
            if index in refused:
                ids = tuple(block.ids[start : start + count])
                self._park(block.handles[index], _EdgeValue(block.slots[index], ids))
            start += count

    def stream_items(self, items: StreamColumns) -> None:
        """As `edges`, of streams."""
        for index in self._graph.stream_put(items.handles, items.edges, items.ids, items.tags):
            item = _StreamItem(items.edges[index], items.ids[index], items.tags[index])
            self._park(items.handles[index], item)

    def stream_end(self, handle: int, edge: int, total: int, started: bool) -> None:
        """`started`: a walk of the request runs here."""
        if started:
            self._graph.stream_end(handle, edge, total)
        else:
            self._park(handle, _StreamTotal(edge, total))

    def deliver(self, handle: int) -> None:
        """The request has started (another partition): try again."""
        for parked in self._parked.pop(handle) or ():
            match parked:
                case _EdgeValue(slot, ids):
                    self.edges(Cols([handle], [slot], list(ids), [len(ids)]))
                case _StreamItem(edge, tensor_id, tag):
                    self.stream_items(StreamColumns([handle], [edge], [tensor_id], [tag]))
                case _StreamTotal(edge, total):
                    self.stream_end(handle, edge, total, started=True)

    def _park(self, handle: int, value: _Parked) -> None:
        parked = self._parked.get(handle)
        if parked is None:
            parked = self._parked[handle] = []
        parked.append(value)

    def _free(self, values: list[_Parked]) -> None:
        ids: list[int] = []
        for parked in values:
            match parked:
                case _EdgeValue(_, held):
                    ids.extend(one for one in held if one != NO_TENSOR)
                case _StreamItem(_, tensor_id, _):
                    ids.append(tensor_id)
                case _StreamTotal():
                    pass
        self._store.free(ids)
