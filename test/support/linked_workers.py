"""Workers of one instance reduced to what moves tensors between them: store, handles, arena, transport, on a bus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mstar.communication.address import peer_name
from mstar.communication.arena import SHM_DIR, Arena, ArenaReader
from mstar.communication.arrivals import StreamArrival
from mstar.communication.bus import Bus
from mstar.communication.messages import AckFrame, EdgeFrame, Hello, PeerUp, StreamFrame
from mstar.communication.tensor_store import TensorStore
from mstar.communication.transport import Credits, Transport
from mstar.graph.protocol import NO_TENSOR, Cols, EdgeColumns, Routed, StreamColumns
from mstar.worker.rid_table import RidTable

INCARNATION = 1


@dataclass(slots=True)
class LinkedWorker:
    """`hello`, `edges`, `streams` and `credits` collect what `pump` has read, in order."""

    rank: int
    rids: RidTable
    store: TensorStore
    bus: Bus
    arena: Arena
    reader: ArenaReader
    transport: Transport
    hellos: list[Hello]
    edges: list[Cols]
    streams: list[StreamArrival]
    credits: list[Credits]

    @classmethod
    def build(
        cls,
        bus: Bus,
        instance: str,
        rank: int,
        *,
        limit_bytes: int = 1 << 20,
        first_bytes: int = 4096,
        directory: Path = SHM_DIR,
        incarnation: int = INCARNATION,
    ) -> LinkedWorker:
        rids, store = RidTable(256), TensorStore()
        arena = Arena(
            instance, rank, incarnation, limit_bytes=limit_bytes, first_bytes=first_bytes, directory=directory
        )
        reader = ArenaReader(instance, directory=directory)
        transport = Transport(
            rank=rank, incarnation=incarnation, names=rids, store=store, bus=bus, arena=arena, reader=reader
        )
        return cls(rank, rids, store, bus, arena, reader, transport, [], [], [], [])

    def meet(self, rank: int, address: str, incarnation: int = INCARNATION) -> None:
        self.transport.peer_up(PeerUp(rank, incarnation, address))

    def pump(self, *, acknowledge: bool = True) -> None:
        """Reads what has arrived and, as at the end of a tick, pays what is owed."""
        for message in self.bus.receive():
            match message:
                case Hello():
                    self.transport.hello(message)
                    self.hellos.append(message)
                case EdgeFrame():
                    self.edges.append(self.transport.read_edges(message))
                case StreamFrame():
                    self.streams.append(self.transport.read_streams(message))
                case AckFrame():
                    self.credits.append(self.transport.read_acks(message))
                case _:
                    raise TypeError(f"{peer_name(self.rank)} got {message}")
        if acknowledge:
            self.transport.send(Routed())

    def free_arrived(self) -> None:
        """As a consumer that is done with everything it got."""
        for cols in self.edges:
            self.store.free([tensor_id for tensor_id in cols.ids if tensor_id != NO_TENSOR])
        for arrival in self.streams:
            self.store.free([tensor_id for tensor_id in arrival.items.ids if tensor_id != NO_TENSOR])
        self.edges.clear()
        self.streams.clear()

    def close(self) -> None:
        self.transport.close()
        self.bus.close()


def routed(
    store: TensorStore,
    peer: int,
    *,
    edges: Sequence[tuple[int, int, Sequence[int]]] = (),
    items: Sequence[tuple[int, int, int, int]] = (),
    ends: Sequence[tuple[int, int, int]] = (),
    credits: Sequence[tuple[int, int, int]] = (),
) -> Routed:
    """What a graph runtime would route to one peer: edges (handle, slot, ids), stream items (handle, edge, id, tag),
    ends (handle, edge, total), credits (handle, edge, count); each id gets the reference that the transport gives
    back."""
    out = Routed()
    if edges:
        ids = [tensor_id for _, _, values in edges for tensor_id in values]
        out.edges[peer] = EdgeColumns(
            [handle for handle, _, _ in edges],
            [slot for _, slot, _ in edges],
            ids,
            [len(values) for _, _, values in edges],
        )
        store.retain([tensor_id for tensor_id in ids if tensor_id != NO_TENSOR])
    if items:
        handles, streams, ids, tags = (list(column) for column in zip(*items, strict=True))
        out.streams[peer] = StreamColumns(handles, streams, ids, tags)
        store.retain(ids)
    if ends:
        out.stream_ends[peer] = tuple(list(column) for column in zip(*ends, strict=True))  # pyright: ignore[reportArgumentType]
    if credits:
        out.credits[peer] = tuple(list(column) for column in zip(*credits, strict=True))  # pyright: ignore[reportArgumentType]
    return out
