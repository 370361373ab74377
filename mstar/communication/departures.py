"""Parcels on their way out: measured, copied into the arena in the order in which they were routed, sent.

Loop thread of a worker. When the arena is full, the oldest parcel waits and all behind it, so that none is overtaken
for ever; acknowledgements never wait, so two full arenas cannot block each other.
"""

from __future__ import annotations

from collections import deque

from mstar.communication.address import peer_name
from mstar.communication.arena import Arena, ArenaError, Reservation
from mstar.communication.bus import Bus
from mstar.communication.debts import Debts, RowFailure
from mstar.communication.messages import EdgeFrame, Message, StreamFrame
from mstar.communication.parcels import NO_COLUMNS, Parcel, Values
from mstar.communication.tensor_store import TensorStore


class Departures:
    """Owns the outgoing queue. The references that came with a parcel's tensors are given back once these are copied,
    or cannot be."""

    def __init__(
        self,
        rank: int,
        store: TensorStore,
        bus: Bus,
        arena: Arena | None,
        debts: Debts,
        failures: list[RowFailure],
    ) -> None:
        """What could not be sent is appended to `failures`."""
        self._rank = rank
        self._store = store
        self._bus = bus
        self._arena = arena
        self._debts = debts
        self._failures = failures
        self._waiting: deque[Parcel] = deque()
        self.num_bytes_sent = 0
        """Of tensors."""

    def __len__(self) -> int:
        """Parcels that wait for room."""
        return len(self._waiting)

    def add(self, parcel: Parcel) -> None:
        """Queues a parcel; in several parts where it could not fit into an empty arena."""
        for values in parcel.values():
            values.lay_out(self._store)
        most = 0 if self._arena is None else self._arena.largest_reservation_bytes
        if any(values.num_bytes > most for values in parcel.values()):
            edges, items = parcel.edges, parcel.items
            parcel.edges = parcel.items = None
            for part in self._parts(edges, most, parcel.peer):
                self._waiting.append(Parcel(parcel.peer, edges=part))
            for part in self._parts(items, most, parcel.peer):
                self._waiting.append(Parcel(parcel.peer, items=part))
        self._waiting.append(parcel)

    def refuse(self, parcel: Parcel, detail: str) -> None:
        """The parcel's requests fail."""
        for values in parcel.values():
            self._fail(values, detail)

    def pump(self) -> None:
        """Sends what waits, oldest first, until a parcel finds no room."""
        while self._waiting:
            parcel = self._waiting[0]
            try:
                rooms = self._reserve(parcel)
            except ArenaError as error:
                self._waiting.popleft()
                self.refuse(parcel, str(error))
                continue
            if rooms is None:
                return
            self._waiting.popleft()
            self._send(parcel.peer, self._frames(parcel, rooms))

    def pay_debts(self) -> None:
        """Acknowledges to every peer that something is owed to."""
        for peer in self._debts.peers():
            self._send(peer, [])

    def drop_peer(self, peer: int) -> None:
        """Drops what waits for a lost peer and frees what it was to read."""
        for parcel in self._waiting:
            if parcel.peer == peer:
                for values in parcel.values():
                    self._give_back(values)
        self._waiting = deque(parcel for parcel in self._waiting if parcel.peer != peer)
        if self._arena is not None:
            self._arena.drop_peer(peer)

    def _parts(self, values: Values | None, most: int, peer: int) -> list[Values]:
        if values is None:
            return []
        if values.num_bytes <= most:
            return [values]
        if len(values.rids) == 1:
            self._fail(values, f"{values.num_bytes} bytes for {peer_name(peer)} do not fit into its arena ({most})")
            return []
        halves = values.halves()
        for half in halves:
            half.lay_out(self._store)
        return [part for half in halves for part in self._parts(half, most, peer)]

    def _reserve(self, parcel: Parcel) -> list[Reservation | None] | None:
        """Room for the edges and the items of a parcel, or None: not for both now."""
        rooms: list[Reservation | None] = []
        for values in parcel.values():
            room = None
            if values.num_bytes:
                assert self._arena is not None, "tensors were measured against the arena"
                try:
                    room = self._arena.reserve(values.num_bytes, parcel.peer)
                finally:
                    if room is None:
                        self._arena.free(parcel.peer, [taken.ticket for taken in rooms if taken is not None])
                if room is None:
                    return None
            rooms.append(room)
        return rooms

    def _frames(self, parcel: Parcel, rooms: list[Reservation | None]) -> list[Message]:
        columns = []
        for values, room in zip(parcel.values(), rooms, strict=True):
            columns.append(values.write(room))
            self.num_bytes_sent += values.num_bytes
            self._give_back(values)
        frames: list[Message] = []
        edges, items = parcel.edges, parcel.items
        if edges is not None:
            frames.append(
                EdgeFrame(
                    src=self._rank, rids=edges.rids, slots=edges.places, counts=edges.counts, tensors=columns.pop(0)
                )
            )
        if items is not None or parcel.end_rids:
            frames.append(
                StreamFrame(
                    src=self._rank,
                    rids=[] if items is None else items.rids,
                    edges=[] if items is None else items.places,
                    tags=[] if items is None else items.tags,
                    tensors=NO_COLUMNS if items is None else columns.pop(0),
                    end_rids=parcel.end_rids,
                    end_edges=parcel.end_edges,
                    end_totals=parcel.end_totals,
                )
            )
        return frames

    def _send(self, peer: int, frames: list[Message]) -> None:
        owed = self._debts.pay(peer, self._rank)
        if owed is not None:
            frames.append(owed)
        if frames:
            self._bus.send(peer_name(peer), frames)

    def _fail(self, values: Values, detail: str) -> None:
        self._failures += [RowFailure(rid, detail) for rid in dict.fromkeys(values.rids)]
        self._give_back(values)

    def _give_back(self, values: Values) -> None:
        values.runs = []
        self._store.free(self._store.release(values.stored_ids()))
