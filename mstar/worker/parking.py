"""Values that reached this worker before their request had started a walk here.

A request is opened on all its workers before any starts, so its handle is known; the front's `StartWalk` and a peer's
frame still race. Runs on the worker's loop thread.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from mstar.graph.protocol import NO_TENSOR, Cols, GraphRuntime, StreamColumns


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


class Parking:
    """Delivers to the graph runtime what it takes, and keeps the rest by handle, in order."""

    def __init__(self, graph: GraphRuntime) -> None:
        self._graph = graph
        self._parked: defaultdict[int, list[_EdgeValue | _StreamItem | _StreamTotal]] = defaultdict(list)

    def edges(self, block: Cols) -> None:
        counts = block.counts if block.counts is not None else [1] * len(block.slots)
        refused = set(self._graph.ingest(block))
        if not refused:
            return
        start = 0
        for index, count in enumerate(counts):
            if index in refused:
                ids = tuple(block.ids[start : start + count])
                self._parked[block.handles[index]].append(_EdgeValue(block.slots[index], ids))
            start += count

    def stream_items(self, items: StreamColumns) -> None:
        for index in self._graph.stream_put(items.handles, items.edges, items.ids, items.tags):
            item = _StreamItem(items.edges[index], items.ids[index], items.tags[index])
            self._parked[items.handles[index]].append(item)

    def stream_end(self, handle: int, edge: int, total: int, started: bool) -> None:
        """`started`: a walk of the request runs here."""
        if started:
            self._graph.stream_end(handle, edge, total)
        else:
            self._parked[handle].append(_StreamTotal(edge, total))

    def deliver(self, handle: int) -> None:
        """The request has started (another partition): try again."""
        for parked in self._parked.pop(handle, ()):
            match parked:
                case _EdgeValue(slot, ids):
                    self.edges(Cols([handle], [slot], list(ids), [len(ids)]))
                case _StreamItem(edge, tensor_id, tag):
                    self.stream_items(StreamColumns([handle], [edge], [tensor_id], [tag]))
                case _StreamTotal(edge, total):
                    self.stream_end(handle, edge, total, started=True)

    def forget(self, handle: int) -> list[int]:
        """The request leaves; returns the tensor ids that were parked for it."""
        ids: list[int] = []
        for parked in self._parked.pop(handle, ()):
            match parked:
                case _EdgeValue(_, values):
                    ids.extend(value for value in values if value != NO_TENSOR)
                case _StreamItem(_, tensor_id, _):
                    ids.append(tensor_id)
                case _StreamTotal():
                    pass
        return ids
