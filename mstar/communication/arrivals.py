"""Frames from peers: their tensors copied out of the peer's arena into the store, their requests given handles.

Loop thread of a worker. A request that is unknown here is normal, it has left: its values are left out and
acknowledged.
A value that cannot be fetched fails the requests of its frame and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from mstar.communication.address import peer_name
from mstar.communication.arena import ArenaError, ArenaReader
from mstar.communication.debts import Debts, RowFailure
from mstar.communication.messages import EdgeFrame, StreamFrame, TensorColumns
from mstar.communication.parcels import FrameError, layout_of, put
from mstar.communication.tensor_store import TensorStore
from mstar.graph.protocol import NO_TENSOR, Cols, StreamColumns


class RidNames(Protocol):
    """Request ids ↔ handles of this process."""

    def handles(self, rids: Sequence[str]) -> list[int | None]:
        """None for a request that is not known here: normal, off the wire."""
        ...

    def rids(self, handles: Sequence[int]) -> list[str]:
        """An unknown handle raises: it comes from here."""
        ...


class StreamEnd(NamedTuple):
    """After `total` items of stream `edge` of a request no further one comes."""

    handle: int
    edge: int
    total: int


class StreamArrival(NamedTuple):
    """What one frame brought of streams, of requests that are known here."""

    items: StreamColumns
    ends: list[StreamEnd]


class Arrivals:
    """Ids that it hands out have no reference yet."""

    def __init__(
        self,
        names: RidNames,
        store: TensorStore,
        reader: ArenaReader | None,
        debts: Debts,
        failures: list[RowFailure],
    ) -> None:
        """What could not be fetched is appended to `failures`."""
        self._names = names
        self._store = store
        self._reader = reader
        self._debts = debts
        self._failures = failures

    def read_edges(self, frame: EdgeFrame) -> Cols:
        """
        Raises:
            FrameError: the frame's columns have unequal lengths.
        """
        self._owe(frame.src, frame.tensors)
        require_equal_lengths(frame, frame.rids, frame.slots, frame.counts)
        handles = self._names.handles(frame.rids)
        ids = self._fetch(frame.src, frame.rids, handles, frame.counts, frame.tensors)
        if ids is None:
            return Cols([], [], [], [])
        known = known_rows(handles)
        return Cols(at(handles, known), at(frame.slots, known), ids, at(frame.counts, known))

    def read_streams(self, frame: StreamFrame) -> StreamArrival:
        """
        Raises:
            FrameError: the frame's columns have unequal lengths.
        """
        self._owe(frame.src, frame.tensors)
        require_equal_lengths(frame, frame.rids, frame.edges, frame.tags)
        require_equal_lengths(frame, frame.end_rids, frame.end_edges, frame.end_totals)
        ending = self._names.handles(frame.end_rids)
        ends = [
            StreamEnd(handle, edge, total)
            for handle, edge, total in zip(ending, frame.end_edges, frame.end_totals, strict=True)
            if handle is not None
        ]
        handles = self._names.handles(frame.rids)
        ids = self._fetch(frame.src, frame.rids, handles, [1] * len(handles), frame.tensors)
        if ids is None:
            return StreamArrival(StreamColumns([], [], [], []), ends)
        known = known_rows(handles)
        return StreamArrival(
            StreamColumns(at(handles, known), at(frame.edges, known), ids, at(frame.tags, known)), ends
        )

    def drop_peer(self, peer: int) -> None:
        """Lets go of a lost peer's memory."""
        if self._reader is not None:
            self._reader.drop_peer(peer)

    def _owe(self, src: int, columns: TensorColumns) -> None:
        """Whatever becomes of the frame, its memory is the sender's again."""
        if columns.ticket:
            self._debts.owe_ticket(src, columns.ticket)

    def _fetch(
        self,
        src: int,
        rids: Sequence[str],
        handles: Sequence[int | None],
        counts: Sequence[int],
        columns: TensorColumns,
    ) -> list[int] | None:
        """Ids of the tensors of known requests; None: the tensors are lost."""
        if not any(handle is not None for handle in handles):
            return []
        try:
            layout = layout_of(columns)
            if layout.num_tensors != sum(counts) or min(counts) < 0:
                raise FrameError(f"{layout.num_tensors} tensors for values of {sum(counts)}")
            raw = torch.empty(layout.num_bytes, dtype=torch.uint8)
            if layout.num_bytes:
                if self._reader is None:
                    raise ArenaError("this worker was started without peers and reads no arena")
                np.copyto(raw.numpy(), self._reader.data(columns.arena, columns.offset, layout.num_bytes))
        except (FrameError, ArenaError) as error:
            detail = f"a value from {peer_name(src)} was lost: {error}"
            named = dict.fromkeys(rid for rid, handle in zip(rids, handles, strict=True) if handle is not None)
            self._failures += [RowFailure(rid, detail) for rid in named]
            return None
        ids = put(columns, layout, raw, self._store)
        return ids if None not in handles else self._only_known(handles, counts, ids)

    def _only_known(self, handles: Sequence[int | None], counts: Sequence[int], ids: list[int]) -> list[int]:
        kept: list[int] = []
        unwanted: list[int] = []
        first = 0
        for handle, count in zip(handles, counts, strict=True):
            (unwanted if handle is None else kept).extend(ids[first : first + count])
            first += count
        self._store.free([tensor_id for tensor_id in unwanted if tensor_id != NO_TENSOR])
        return kept


def require_equal_lengths(frame: object, *columns: Sequence) -> None:
    """
    Raises:
        FrameError: they are not.
    """
    if len(set(map(len, columns))) > 1:
        raise FrameError(f"columns of {type(frame).__name__} have lengths {[len(column) for column in columns]}")


def known_rows(handles: Sequence[int | None]) -> list[int] | None:
    """Indices of requests that are known here; None: all are."""
    return [i for i, handle in enumerate(handles) if handle is not None] if None in handles else None


def at(column: Sequence, rows: Sequence[int] | None) -> list:
    return list(column) if rows is None else [column[row] for row in rows]
