"""Tensors and their bookkeeping between the workers of one host: routed columns become frames, frames become columns.

Runs on the loop thread of a worker. Tensors are copied into this worker's arena and out of the peer's; messages hold
columns only, and one multipart message goes to each destination of a step. It decides nothing about requests: what
could not cross is reported by `take_failures`.
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import mstar
from mstar.communication.address import peer_name
from mstar.communication.arena import Arena, ArenaReader
from mstar.communication.arrivals import Arrivals, RidNames, StreamArrival, at, known_rows, require_equal_lengths
from mstar.communication.bus import Bus
from mstar.communication.debts import Debts, RowFailure
from mstar.communication.departures import Departures
from mstar.communication.messages import AckFrame, EdgeFrame, Hello, PeerLost, PeerUp, StreamFrame
from mstar.communication.parcels import Parcel, Values
from mstar.communication.tensor_store import TensorStore
from mstar.communication.wire import schema_hash, why_refused
from mstar.graph.protocol import Cols, Routed

logger = logging.getLogger(__name__)


class Credits(NamedTuple):
    """Stream items that a peer consumed, parallel lists."""

    handles: list[int]
    edges: list[int]
    counts: list[int]


class Transport:
    """See the module docstring. Ids in `Routed` carry one reference each, which the transport gives back; ids that it
    hands out have none."""

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        names: RidNames,
        store: TensorStore,
        bus: Bus,
        arena: Arena | None = None,
        reader: ArenaReader | None = None,
    ) -> None:
        """`arena` and `reader` may be None in an instance with one worker only."""
        self._rank = rank
        self._incarnation = incarnation
        self._names = names
        self._bus = bus
        self._arena = arena
        self._reader = reader
        self._debts = Debts()
        self._failures: list[RowFailure] = []
        self._departures = Departures(rank, store, bus, arena, self._debts, self._failures)
        self._arrivals = Arrivals(names, store, reader, self._debts, self._failures)
        self._peers: dict[int, int] = {}
        """Rank of a connected process → its incarnation."""
        self._refused: dict[int, str] = {}

    @property
    def num_waiting(self) -> int:
        """Parcels that wait for room in the arena."""
        return len(self._departures)

    @property
    def num_bytes_sent(self) -> int:
        """Of tensors, to all peers."""
        return self._departures.num_bytes_sent

    def take_failures(self) -> list[RowFailure]:
        """What could not be sent or fetched since the last call: these requests cannot go on."""
        if not self._failures:
            return []
        failures = self._failures.copy()
        self._failures.clear()
        return failures

    def peer_up(self, message: PeerUp) -> None:
        """Connects a process and introduces this one. A new incarnation replaces the old one."""
        rank = message.rank
        if rank == self._rank or message.incarnation <= self._peers.get(rank, -1):
            return
        self._forget(rank)
        self._peers[rank] = message.incarnation
        self._refused.pop(rank, None)
        self._bus.connect(peer_name(rank), message.address)
        hello = Hello(
            rank=self._rank,
            incarnation=self._incarnation,
            version=mstar.__version__,
            schema_hash=schema_hash(),
            pid=os.getpid(),
        )
        self._bus.send(peer_name(rank), (hello,))

    def peer_lost(self, message: PeerLost) -> None:
        """Drops what waits for a lost process and frees what it was to read. Who depends on it is not decided here."""
        if self._peers.get(message.rank) == message.incarnation:
            self._forget(message.rank)
            self._departures.pump()

    def hello(self, message: Hello) -> None:
        """A peer introduces itself; one of another version is talked to no more."""
        reason = why_refused(message, mstar.__version__)
        if reason is not None and self._peers.get(message.rank) == message.incarnation:
            logger.error("%s is refused: %s", peer_name(message.rank), reason)
            self._forget(message.rank)
            self._refused[message.rank] = reason

    def send(self, routed: Routed) -> None:
        """Sends `edges`, `streams`, `stream_ends` and `credits`, with the acknowledgements that are due. What finds no
        room in the arena goes later, in order; nothing blocks.

        Raises:
            ValueError: something is routed to this worker itself.
        """
        for peer, (handles, edges, counts) in routed.credits.items():
            self._debts.owe_credits(peer, self._names.rids(handles), edges, counts)
        if routed.edges or routed.streams or routed.stream_ends:
            for peer in sorted({*routed.edges, *routed.streams, *routed.stream_ends}):
                self._route(peer, routed)
            self._departures.pump()
        self._departures.pay_debts()

    def rest(self) -> None:
        """The worker has nothing to run: pays what is owed and gives unused shared memory back."""
        self._departures.pay_debts()
        if self._arena is not None:
            self._arena.trim()
        if self._reader is not None:
            self._reader.trim()

    def read_edges(self, frame: EdgeFrame) -> Cols:
        """Values out of the peer's arena. Those of requests that are unknown here are left out."""
        return self._arrivals.read_edges(frame)

    def read_streams(self, frame: StreamFrame) -> StreamArrival:
        """As `read_edges`: stream items, in their order, and the ends of streams."""
        return self._arrivals.read_streams(frame)

    def read_acks(self, frame: AckFrame) -> Credits:
        """Frees what the peer has copied out, and with it what was lost on the way there before; this may let waiting
        parcels go. Returns the peer's credits."""
        require_equal_lengths(frame, frame.credit_rids, frame.credit_edges, frame.credit_counts)
        if self._arena is not None and self._arena.free(frame.src, frame.tickets):
            if num_lost := self._arena.free_older(frame.src, max(frame.tickets)):
                logger.warning("%d frames with tensors never reached %s", num_lost, peer_name(frame.src))
            self._departures.pump()
        handles = self._names.handles(frame.credit_rids)
        known = known_rows(handles)
        return Credits(at(handles, known), at(frame.credit_edges, known), at(frame.credit_counts, known))

    def close(self) -> None:
        """Drops what waits and removes the arena. The bus stays the caller's."""
        for rank in list(self._peers):
            self._forget(rank)
        if self._arena is not None:
            self._arena.close()
        if self._reader is not None:
            self._reader.close()

    def _route(self, peer: int, routed: Routed) -> None:
        if peer == self._rank:
            raise ValueError(f"rank {peer} routed values to itself; the graph delivers those")
        names = self._names.rids
        parcel = Parcel(peer)
        edges, items, ends = routed.edges.get(peer), routed.streams.get(peer), routed.stream_ends.get(peer)
        if edges is not None:
            parcel.edges = Values(names(edges.handles), edges.slots, [], edges.counts, edges.ids)
        if items is not None:
            parcel.items = Values(names(items.handles), items.edges, items.tags, [1] * len(items.ids), items.ids)
        if ends is not None:
            parcel.end_rids, parcel.end_edges, parcel.end_totals = names(ends[0]), ends[1], ends[2]
        if peer in self._peers:
            self._departures.add(parcel)
        else:
            reason = self._refused.get(peer, "it is not connected")
            self._departures.refuse(parcel, f"{peer_name(peer)} cannot be reached: {reason}")

    def _forget(self, rank: int) -> None:
        if self._peers.pop(rank, None) is not None:
            self._bus.disconnect(peer_name(rank))
        self._debts.forgive(rank)
        self._departures.drop_peer(rank)
        self._arrivals.drop_peer(rank)
