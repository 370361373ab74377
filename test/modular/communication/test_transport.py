"""Tensors between workers over a loopback bus and real shared memory: contents, order, back-pressure, loss."""

import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.linked_workers import LinkedWorker, routed

import mstar
from mstar.communication import wire
from mstar.communication.loopback import LoopbackNet
from mstar.communication.messages import AckFrame, EdgeFrame, Hello, PeerLost, StreamFrame, TensorColumns
from mstar.communication.parcels import FrameError
from mstar.communication.tensor_store import StoreError
from mstar.graph.protocol import LIVE_COLUMN, NO_TENSOR, Routed

RIDS = [f"r{i}" for i in range(16)]


class Mesh:
    """Workers that all know each other and the requests `RIDS`, with equal handles everywhere unless shifted."""

    def __init__(self, directory: Path, num_workers: int = 2, **sizes: int) -> None:
        self.net = LoopbackNet()
        self.directory = directory
        instance = secrets.token_hex(4)
        self.workers = [
            LinkedWorker.build(
                self.net.bus(f"w{rank}", wire.decode_to_worker), instance, rank, directory=directory, **sizes
            )
            for rank in range(num_workers)
        ]
        for worker in self.workers:
            for rid in RIDS[worker.rank :] + RIDS[: worker.rank]:  # handles differ between workers
                worker.rids.intern(rid)
            for other in self.workers:
                worker.meet(other.rank, f"w{other.rank}")
        self.settle()

    def handle(self, rank: int, rid: str) -> int:
        handle = self.workers[rank].rids.handle(rid)
        assert handle is not None
        return handle

    def settle(self) -> None:
        """Until nothing is under way."""
        for _ in range(200):
            busy = False
            for worker in self.workers:
                busy |= worker.bus.wait(0)
                worker.pump()
            if not busy:
                return
        raise AssertionError("the workers never come to rest")

    def assert_at_rest(self) -> None:
        for worker in self.workers:
            worker.free_arrived()
            worker.transport.rest()
            assert (worker.store.num_live, worker.arena.num_tickets, worker.transport.num_waiting) == (0, 0, 0)
            assert worker.transport.take_failures() == []
        assert len(list(self.directory.iterdir())) == len(self.workers), "one segment each"

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        assert list(self.directory.iterdir()) == []


@pytest.fixture
def make_mesh(tmp_path: Path) -> Iterator[Callable[..., Mesh]]:
    made: list[Mesh] = []

    def make(num_workers: int = 2, **sizes: int) -> Mesh:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Mesh(directory, num_workers, **sizes))
        return made[-1]

    yield make
    for mesh in made:
        mesh.close()


def values_of(worker: LinkedWorker) -> list[tuple[str, int, list[torch.Tensor | None]]]:
    """(rid, slot, tensors) of all edges that arrived."""
    out = []
    for cols in worker.edges:
        assert cols.counts is not None
        ids = iter(cols.ids)
        for handle, slot, count in zip(cols.handles, cols.slots, cols.counts, strict=True):
            mine = [next(ids) for _ in range(count)]
            out.append((worker.rids.rid(handle), slot, [worker.store.get(i) if i else None for i in mine]))
        assert next(ids, None) is None
    return out


def test_workers_introduce_themselves(make_mesh: Callable[..., Mesh]) -> None:
    a, b = make_mesh().workers
    assert [(hello.rank, hello.version) for hello in a.hellos] == [(1, mstar.__version__)]
    assert [hello.rank for hello in b.hellos] == [0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool, torch.uint8]
)
def test_rows_of_one_batch_cross_as_one_run(make_mesh: Callable[..., Mesh], dtype: torch.dtype) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    batch = torch.randint(0, 2, (5, 3)).to(dtype)
    ids = a.store.put_batch(batch).tolist()
    a.transport.send(routed(a.store, 1, edges=[(mesh.handle(0, RIDS[i]), 7 + i, [ids[i]]) for i in range(5)]))
    assert a.store.num_live == 0, "copied, so given back"
    assert a.arena.num_tickets == 1
    mesh.settle()
    assert [(rid, slot) for rid, slot, _ in values_of(b)] == [(RIDS[i], 7 + i) for i in range(5)]
    for (_, _, tensors), row in zip(values_of(b), batch, strict=True):
        assert tensors[0] is not None
        assert tensors[0].dtype == dtype
        assert torch.equal(tensors[0], row)
    mesh.assert_at_rest()


def test_mixed_shapes_dtypes_lists_absent_values_and_markers(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    tensors: dict[int, torch.Tensor] = {}

    def put(tensor: torch.Tensor) -> int:
        tensor_id = a.store.put(tensor)
        tensors[tensor_id] = tensor
        return tensor_id

    values = [
        (RIDS[0], 1, [put(torch.randn(3)), put(torch.randn(3)), put(torch.randn(4))]),
        (RIDS[1], 2, [NO_TENSOR]),
        (RIDS[2], 3, []),
        (RIDS[3], 4, [put(torch.randn(5, 6).bfloat16().T), NO_TENSOR, put(torch.tensor(3))]),
        (RIDS[4], 5, [put(torch.empty(0, 2)), put(torch.tensor([True]))]),
        (RIDS[0], 6, [put(torch.randn(40_000)), put(torch.randn(40_000))]),
        (RIDS[5], 7, [put(torch.randn(2, 2).requires_grad_())]),
    ]
    shared = values[0][2][0]
    values.append((RIDS[6], 8, [shared, shared]))
    expected = [(rid, slot, [tensors.get(i) for i in ids]) for rid, slot, ids in values]
    a.transport.send(routed(a.store, 1, edges=[(mesh.handle(0, rid), slot, ids) for rid, slot, ids in values]))
    mesh.settle()
    for got, wanted in zip(values_of(b), expected, strict=True):
        assert got[:2] == wanted[:2]
        assert len(got[2]) == len(wanted[2])
        for tensor, source in zip(got[2], wanted[2], strict=True):
            assert (tensor is None) == (source is None)
            if tensor is not None and source is not None:
                assert (tensor.dtype, tensor.shape) == (source.dtype, source.shape)
                assert torch.equal(tensor, source.detach())
    mesh.assert_at_rest()


def test_what_arrived_is_a_copy(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    handle = mesh.handle(0, "r0")
    for value in (1.0, 2.0):
        a.transport.send(routed(a.store, 1, edges=[(handle, 0, [a.store.put(torch.full((4,), value))])]))
        mesh.settle()  # acknowledged: the second lands where the first was
    assert [tensors[0].tolist() for _, _, tensors in values_of(b) if tensors[0] is not None] == [[1.0] * 4, [2.0] * 4]
    mesh.assert_at_rest()


def test_one_message_per_destination_and_step(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(3)
    a, b, c = mesh.workers
    r0, r1 = mesh.handle(0, "r0"), mesh.handle(0, "r1")
    b.transport.send(routed(b.store, 0, edges=[(mesh.handle(1, "r0"), 0, [b.store.put(torch.zeros(1))])]))
    a.pump(acknowledge=False)
    before = a.bus.counters.num_sent
    step = routed(
        a.store,
        1,
        edges=[(r0, 0, [a.store.put(torch.zeros(1))])],
        items=[(r0, 4, a.store.put(torch.zeros(1)), 2)],
        ends=[(r1, 5, 9)],
        credits=[(r1, 6, 3)],
    )
    step.edges[2] = routed(a.store, 2, edges=[(r1, 0, [a.store.put(torch.zeros(1))])]).edges[2]
    a.transport.send(step)
    assert a.bus.counters.num_sent - before == 2
    frames = b.bus.receive()
    assert [type(frame) for frame in frames] == [EdgeFrame, StreamFrame, AckFrame]
    assert b.transport.read_acks(frames[2]) == ([mesh.handle(1, "r1")], [6], [3])
    assert b.arena.num_tickets == 0
    b.edges.append(b.transport.read_edges(frames[0]))
    b.streams.append(b.transport.read_streams(frames[1]))
    b.transport.send(Routed())
    mesh.settle()
    assert [slot for _, slot, _ in values_of(c)] == [0]
    mesh.assert_at_rest()
    before = a.bus.counters.num_sent
    a.transport.send(Routed())
    a.transport.rest()
    assert a.bus.counters.num_sent == before


def test_streams_keep_order_tags_and_ends(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    r0, r1 = mesh.handle(0, "r0"), mesh.handle(0, "r1")
    items = [(r0 if i % 3 else r1, i % 2, a.store.put(torch.tensor([float(i)])), i * 10) for i in range(9)]
    a.transport.send(routed(a.store, 1, items=items))
    a.transport.send(routed(a.store, 1, ends=[(r0, 0, 5), (r1, 1, 4)]))
    mesh.settle()
    first, second = b.streams
    assert [b.rids.rid(handle) for handle in first.items.handles] == ["r0" if i % 3 else "r1" for i in range(9)]
    assert first.items.edges == [i % 2 for i in range(9)]
    assert first.items.tags == [i * 10 for i in range(9)]
    assert b.store.gather(first.items.ids).flatten().tolist() == [float(i) for i in range(9)]
    assert first.ends == []
    assert second.items.ids == []
    assert second.ends == [(mesh.handle(1, "r0"), 0, 5), (mesh.handle(1, "r1"), 1, 4)]
    mesh.assert_at_rest()


def test_requests_unknown_to_the_receiver_are_left_out_and_acknowledged(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    for rid in ("r1", "r3"):
        b.rids.release(mesh.handle(1, rid))
    ids = a.store.put_batch(torch.arange(6.0).reshape(6, 1)).tolist()
    edges = [(mesh.handle(0, f"r{i}"), i, [ids[i]]) for i in range(4)]
    items = [(mesh.handle(0, f"r{i - 3}"), 0, ids[i], 0) for i in (4, 5)]
    ends = [(mesh.handle(0, rid), 0, 1) for rid in ("r1", "r2")]
    a.transport.send(routed(a.store, 1, edges=edges, items=items, ends=ends))
    mesh.settle()
    assert [(rid, slot, [t.item() for t in tensors if t is not None]) for rid, slot, tensors in values_of(b)] == [
        ("r0", 0, [0.0]),
        ("r2", 2, [2.0]),
    ]
    (arrival,) = b.streams
    assert b.store.gather(arrival.items.ids).tolist() == [[5.0]]
    assert arrival.ends == [(mesh.handle(1, "r2"), 0, 1)]
    assert b.store.num_live == 3
    mesh.assert_at_rest()
    a.transport.send(routed(a.store, 1, edges=[(mesh.handle(0, "r1"), 0, [a.store.put(torch.zeros(1))])]))
    b.transport.send(routed(b.store, 0, credits=[(mesh.handle(1, "r0"), 1, 2), (mesh.handle(1, "r2"), 1, 3)]))
    a.rids.release(mesh.handle(0, "r0"))
    mesh.settle()
    assert [credits for credits in a.credits if credits.handles] == [([mesh.handle(0, "r2")], [1], [3])]
    mesh.assert_at_rest()


def test_memory_of_a_lost_frame_is_free_when_a_later_one_is_acknowledged(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    handle = mesh.handle(0, "r0")
    mesh.net.hold("w0", "w1")
    for i in range(3):
        a.transport.send(routed(a.store, 1, edges=[(handle, i, [a.store.put(torch.full((8,), float(i)))])]))
    assert mesh.net.deliver("w0", "w1", 1) + mesh.net.drop("w0", "w1", 1) == 2
    mesh.settle()
    assert a.arena.num_tickets == 2, "the lost one and the one that is still under way"
    mesh.net.unhold()
    mesh.settle()
    assert [(slot, tensors[0][0].item()) for _, slot, tensors in values_of(b) if tensors[0] is not None] == [
        (0, 0.0),
        (2, 2.0),
    ]
    mesh.assert_at_rest()


def test_a_full_arena_makes_parcels_wait_in_order(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(limit_bytes=8192, first_bytes=4096)
    a, b = mesh.workers
    handle = mesh.handle(0, "r0")
    for i in range(12):
        tensor = torch.full((750 if i % 3 else 10,), float(i))
        a.transport.send(routed(a.store, 1, edges=[(handle, i, [a.store.put(tensor)])]))
    assert a.transport.num_waiting > 5
    assert a.store.num_live == a.transport.num_waiting
    mesh.settle()
    assert [(slot, tensors[0][0].item()) for _, slot, tensors in values_of(b) if tensors[0] is not None] == [
        (i, float(i)) for i in range(12)
    ]
    mesh.assert_at_rest()


def test_a_parcel_whose_items_find_no_room_holds_none_for_its_edges(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(limit_bytes=8192, first_bytes=4096)
    a, b = mesh.workers
    handle = mesh.handle(0, "r0")
    for i in range(3):
        edge, item = a.store.put(torch.full((10,), float(i))), a.store.put(torch.full((900,), i + 0.5))
        a.transport.send(routed(a.store, 1, edges=[(handle, i, [edge])], items=[(handle, i, item, 0)]))
    assert a.transport.num_waiting == 1
    assert a.arena.num_tickets == 4, "two parcels of two"
    mesh.settle()
    assert [tensors[0][0].item() for _, _, tensors in values_of(b) if tensors[0] is not None] == [0.0, 1.0, 2.0]
    assert [b.store.get(arrival.items.ids[0])[0].item() for arrival in b.streams] == [0.5, 1.5, 2.5]
    mesh.assert_at_rest()


def test_two_full_arenas_do_not_block_each_other(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(limit_bytes=8192, first_bytes=4096)
    for worker in mesh.workers:
        handle = mesh.handle(worker.rank, "r0")
        for i in range(8):
            tensor = torch.full((1000,), float(i))
            worker.transport.send(
                routed(
                    worker.store,
                    1 - worker.rank,
                    items=[(handle, 0, worker.store.put(tensor), 0)],
                    credits=[(handle, 1, 1)],
                )
            )
    mesh.settle()
    for worker in mesh.workers:
        assert [worker.store.get(a.items.ids[0])[0].item() for a in worker.streams] == [float(i) for i in range(8)]
        assert sum(sum(credits.counts) for credits in worker.credits) == 8
    mesh.assert_at_rest()


def test_a_step_larger_than_the_arena_goes_in_parts(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(limit_bytes=8192, first_bytes=4096)
    a, b = mesh.workers
    handles = [mesh.handle(0, f"r{i}") for i in range(9)]
    batch = torch.arange(9 * 400.0).reshape(9, 400)
    ids = a.store.put_batch(batch).tolist()
    item_ids = a.store.put_batch(batch + 0.5).tolist()
    a.transport.send(
        routed(
            a.store,
            1,
            edges=[(handles[i], i, [ids[i]]) for i in range(9)],
            items=[(handles[i], 0, item_ids[i], i) for i in range(9)],
            ends=[(handles[0], 0, 9)],
        )
    )
    mesh.settle()
    assert len(b.edges) > 3
    got = [tensors[0] for _, _, tensors in values_of(b) if tensors[0] is not None]
    assert torch.equal(torch.stack(got), batch)
    assert [tag for arrival in b.streams for tag in arrival.items.tags] == list(range(9))
    items = [b.store.get(i) for arrival in b.streams for i in arrival.items.ids]
    assert torch.equal(torch.stack(items), batch + 0.5)
    assert b.streams[-1].ends == [(mesh.handle(1, "r0"), 0, 9)]
    mesh.assert_at_rest()


def test_a_value_larger_than_the_arena_fails_its_request_only(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(limit_bytes=8192, first_bytes=4096)
    a, b = mesh.workers
    sizes = {"r0": 10, "r1": 1025, "r2": 10}
    a.transport.send(
        routed(
            a.store,
            1,
            edges=[(mesh.handle(0, rid), 0, [a.store.put(torch.zeros(size))]) for rid, size in sizes.items()],
        )
    )
    ((rid, detail),) = a.transport.take_failures()
    assert rid == "r1"
    assert "4160 bytes for w1 do not fit" in detail
    mesh.settle()
    assert [rid for rid, _, _ in values_of(b)] == ["r0", "r2"]
    mesh.assert_at_rest()


def test_a_lost_peer_gets_nothing_and_holds_nothing(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(3, limit_bytes=8192, first_bytes=4096)
    a, _, c = mesh.workers
    handle = mesh.handle(0, "r0")
    mesh.net.hold("w0", "w1")
    for i in range(4):
        a.transport.send(routed(a.store, 1, edges=[(handle, i, [a.store.put(torch.zeros(1000))])]))
    a.transport.send(routed(a.store, 2, edges=[(handle, 0, [a.store.put(torch.zeros(1000))])]))
    assert a.transport.num_waiting == 3
    assert c.bus.receive() == []
    a.transport.peer_lost(PeerLost(1, 0, "an earlier one"))
    assert a.transport.num_waiting == 3, "that one was replaced long ago"
    a.transport.peer_lost(PeerLost(1, 1, "killed"))
    mesh.settle()
    assert [slot for _, slot, _ in values_of(c)] == [0]
    a.transport.send(routed(a.store, 1, edges=[(handle, 0, [a.store.put(torch.zeros(1))])], credits=[(handle, 0, 1)]))
    assert a.transport.take_failures() == [("r0", "w1 cannot be reached: it is not connected")]
    mesh.assert_at_rest()


def test_a_restarted_peer_is_another_one(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    handle = mesh.handle(0, "r0")
    a.transport.send(routed(a.store, 1, edges=[(handle, 0, [a.store.put(torch.zeros(8))])]))
    (frame,) = b.bus.receive()
    b.transport.read_edges(frame)
    b.store.free(b.store.put_batch(torch.zeros(1)).tolist())
    a.meet(1, "w1", incarnation=1)
    assert a.arena.num_tickets == 1, "known already"
    a.meet(1, "w1", incarnation=2)
    assert a.arena.num_tickets == 0
    fresh = routed(a.store, 1, edges=[(handle, 0, [a.store.put(torch.zeros(8))])])
    a.transport.send(fresh)
    b.transport.send(Routed())  # of the first incarnation, for a ticket that has been dropped
    a.pump()
    assert a.arena.num_tickets == 1
    mesh.settle()
    assert a.arena.num_tickets == 0


def test_acknowledgements_owed_to_a_lost_peer_are_forgotten(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    a.transport.send(routed(a.store, 1, edges=[(mesh.handle(0, "r0"), 0, [a.store.put(torch.zeros(8))])]))
    b.pump(acknowledge=False)
    b.transport.peer_lost(PeerLost(0, 1, "killed"))
    b.meet(0, "w0", incarnation=2)
    mesh.net.hold()
    b.transport.send(Routed())
    assert mesh.net.pending() == {}
    assert b.reader.num_mapped == 0


@pytest.mark.parametrize(
    ("change", "reason"), [({"version": "9.9"}, "runs mstar 9.9"), ({"schema_hash": "0"}, "message schema 0")]
)
def test_a_peer_of_another_version_is_refused(
    make_mesh: Callable[..., Mesh], change: dict[str, str], reason: str
) -> None:
    mesh = make_mesh()
    a, _ = mesh.workers
    hello = Hello(rank=1, incarnation=1, version=mstar.__version__, schema_hash=wire.schema_hash(), pid=1)
    a.transport.hello(hello)
    assert a.bus.send("w1", [hello])
    a.transport.hello(msgspec.structs.replace(hello, **change))
    assert not a.bus.send("w1", [hello])
    a.transport.send(routed(a.store, 1, edges=[(mesh.handle(0, "r0"), 0, [a.store.put(torch.zeros(1))])]))
    ((rid, detail),) = a.transport.take_failures()
    assert rid == "r0"
    assert reason in detail
    assert a.store.num_live == 0


GOOD = TensorColumns("", 0, 0, ["float32"], [(2,)], [2])


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (msgspec.structs.replace(GOOD, counts=[3]), "3 tensors for values of 2"),
        (msgspec.structs.replace(GOOD, shapes=[(-2,)]), "2 tensors of shape"),
        (msgspec.structs.replace(GOOD, counts=[-2]), "-2 tensors"),
        (msgspec.structs.replace(GOOD, dtypes=["float33"]), "float33"),
        (msgspec.structs.replace(GOOD, dtypes=[]), "unequal lengths"),
        (msgspec.structs.replace(GOOD, arena="mstar-0-0-w0-1-1"), "no arena of this instance"),
        (msgspec.structs.replace(GOOD, offset=1 << 40), "which has"),
    ],
)
def test_a_value_that_cannot_be_fetched_fails_only_its_requests(
    make_mesh: Callable[..., Mesh], tensors: TensorColumns, reason: str
) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    room = a.arena.reserve(128, 1)
    assert room is not None
    tensors = msgspec.structs.replace(tensors, ticket=room.ticket, arena=tensors.arena or room.segment)
    bad = EdgeFrame(src=0, rids=["r0", "gone", "r1", "r0"], slots=[0] * 4, counts=[1, 1, 0, 0], tensors=tensors)
    a.bus.send("w1", [bad])
    a.transport.send(routed(a.store, 1, edges=[(mesh.handle(0, "r2"), 5, [a.store.put(torch.zeros(1))])]))
    mesh.settle()
    failures = b.transport.take_failures()
    assert [failure.rid for failure in failures] == ["r0", "r1"]
    assert all("from w0 was lost" in failure.detail and reason in failure.detail for failure in failures)
    assert [(rid, slot) for rid, slot, _ in values_of(b)] == [("r2", 5)]
    assert b.transport.take_failures() == []
    mesh.assert_at_rest()


def test_columns_that_contradict_each_other_are_an_error_and_acknowledged(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, b = mesh.workers
    rooms = [a.arena.reserve(64, 1) for _ in range(3)]
    columns = [TensorColumns(room.segment, room.ticket, 0, [], [], []) for room in rooms if room is not None]
    edge = EdgeFrame(src=0, rids=["r0"], slots=[], counts=[1], tensors=columns[0])
    stream = StreamFrame(
        src=0, rids=["r0"], edges=[0], tags=[], tensors=columns[1], end_rids=[], end_edges=[], end_totals=[]
    )
    ends = StreamFrame(
        src=0, rids=[], edges=[], tags=[], tensors=columns[2], end_rids=["r0"], end_edges=[], end_totals=[]
    )
    for read, frame in (
        (b.transport.read_edges, edge),
        (b.transport.read_streams, stream),
        (b.transport.read_streams, ends),
    ):
        with pytest.raises(FrameError, match="lengths"):
            read(frame)
    with pytest.raises(FrameError, match="lengths"):
        b.transport.read_acks(AckFrame(src=0, tickets=[], credit_rids=["r0"], credit_edges=[], credit_counts=[]))
    b.transport.send(Routed())
    mesh.settle()
    mesh.assert_at_rest()


def test_mistakes_of_the_caller_raise(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    a, _ = mesh.workers
    handle = mesh.handle(0, "r0")
    with pytest.raises(ValueError, match="to itself"):
        a.transport.send(routed(a.store, 0, ends=[(handle, 0, 1)]))
    step = routed(a.store, 1, edges=[(handle, 0, [NO_TENSOR])])
    step.edges[1].ids[0] = LIVE_COLUMN
    with pytest.raises(StoreError):
        a.transport.send(step)


def test_a_worker_without_peers_needs_no_arena() -> None:
    from mstar.communication.tensor_store import TensorStore
    from mstar.communication.transport import Transport
    from mstar.worker.rid_table import RidTable

    bus = LoopbackNet().bus("w0", wire.decode_to_worker)
    transport = Transport(rank=0, incarnation=1, names=RidTable(4), store=TensorStore(), bus=bus)
    transport.send(Routed())
    transport.rest()
    transport.close()
    bus.close()


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_random_traffic_arrives_whole_in_order_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_workers: int
) -> None:
    """Random steps through arenas far too small, delivered in random orders: per sender and receiver, every value comes
    once, in order, with its bytes."""
    rng = random.Random(seed)
    mesh = Mesh(tmp_path_factory.mktemp("arena"), num_workers + 1, limit_bytes=8192, first_bytes=2048)
    mesh.net.hold()
    sent: dict[tuple[int, int], list[tuple[str, int, bytes]]] = {}
    streamed: dict[tuple[int, int], list[tuple[str, int, bytes]]] = {}
    for number in range(rng.randrange(1, 25)):
        worker = rng.choice(mesh.workers)
        peer = rng.choice([other.rank for other in mesh.workers if other is not worker])
        count = rng.randrange(1, 6)
        if rng.random() < 0.5:
            rows = list(torch.from_numpy(np.random.default_rng(number).integers(0, 99, (count, rng.randrange(1, 300)))))
            ids = worker.store.put_batch(torch.stack(rows)).tolist()
        else:
            rows = [torch.full((rng.randrange(0, 400),), number + i, dtype=torch.int16) for i in range(count)]
            ids = [worker.store.put(row) for row in rows]
        rids = [rng.choice(RIDS) for _ in range(count)]
        entries = [(rid, number, row.numpy().tobytes()) for rid, row in zip(rids, rows, strict=True)]
        handles = [mesh.handle(worker.rank, rid) for rid in rids]
        pair = (worker.rank, peer)
        if rng.random() < 0.5:
            worker.transport.send(
                routed(worker.store, peer, edges=[(h, number, [i]) for h, i in zip(handles, ids, strict=True)])
            )
            sent.setdefault(pair, []).extend(entries)
        else:
            worker.transport.send(
                routed(worker.store, peer, items=[(h, number, i, 0) for h, i in zip(handles, ids, strict=True)])
            )
            streamed.setdefault(pair, []).extend(entries)
        if rng.random() < 0.5:
            mesh.net.deliver_shuffled(rng)
            rng.choice(mesh.workers).pump(acknowledge=rng.random() < 0.7)
    busy = True
    while busy:
        for worker in mesh.workers:
            worker.pump()
        busy = mesh.net.deliver_shuffled(rng) > 0
    for worker in mesh.workers:
        senders = {}
        for rid, slot, tensors in values_of(worker):
            assert tensors[0] is not None
            senders.setdefault(slot, []).append((rid, slot, tensors[0].numpy().tobytes()))
        assert senders == by_number(sent, worker.rank)
        items: dict[int, list] = {}
        for arrival in worker.streams:
            for handle, edge, tensor_id in zip(
                arrival.items.handles, arrival.items.edges, arrival.items.ids, strict=True
            ):
                items.setdefault(edge, []).append(
                    (worker.rids.rid(handle), edge, worker.store.get(tensor_id).numpy().tobytes())
                )
        assert items == by_number(streamed, worker.rank)
    for pair, entries in sent.items():  # steps of one sender arrive in the order they were sent in
        slots = [slot for _, slot, _ in values_of(mesh.workers[pair[1]])]
        mine = {slot for _, slot, _ in entries}
        assert [slot for slot in slots if slot in mine] == sorted(slot for slot in slots if slot in mine)
    mesh.assert_at_rest()
    mesh.close()


def by_number(sent: dict[tuple[int, int], list[tuple[str, int, bytes]]], rank: int) -> dict[int, list]:
    out: dict[int, list] = {}
    for (_, peer), entries in sent.items():
        for entry in entries if peer == rank else ():
            out.setdefault(entry[1], []).append(entry)
    return out


def test_64_rows_cross_in_300_us(make_mesh: Callable[..., Mesh]) -> None:
    """CPU time of both loop threads together, for rows of one batch."""
    mesh = make_mesh()
    a, b = mesh.workers
    for i in range(16, 64):
        a.rids.intern(f"r{i}")
        b.rids.intern(f"r{i}")
    batch = torch.randn(64, 64)
    handles = list(range(64))
    spent_us = []
    for _ in range(200):
        ids = a.store.put_batch(batch).tolist()
        step = routed(a.store, 1, edges=[(h, 0, [i]) for h, i in zip(handles, ids, strict=True)])
        began = time.thread_time_ns()
        a.transport.send(step)
        b.pump()
        a.pump()
        spent_us.append((time.thread_time_ns() - began) / 1e3)
        b.free_arrived()
    assert a.bus.counters.largest_frame_bytes < 4096
    assert statistics.median(spent_us) < 300
