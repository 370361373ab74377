"""A large tensor between two real processes, and shared memory after either of them was killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.linked_workers import LinkedWorker, routed
from support.repository import ROOT
from support.transport_peer import NUM_FLOATS, digest

from mstar.communication import wire
from mstar.communication.address import InstanceDir
from mstar.communication.arena import SHM_DIR, reclaim
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import EdgeFrame, PeerLost

pytestmark = pytest.mark.timeout(90)
FIRST_BYTES = 4096


class Pair:
    """Rank 0 in this process, rank 1 in another."""

    def __init__(self, base: Path) -> None:
        self.instance = InstanceDir.create(base)
        bus = ZmqBus(self.instance.address("w0", 1), wire.decode_to_worker)
        self.here = LinkedWorker.build(bus, self.instance.instance, 0, limit_bytes=8 << 20, first_bytes=FIRST_BYTES)
        self.handle = self.here.rids.intern("r0")
        self.children: list[subprocess.Popen] = []

    def start(self, mode: str, incarnation: int = 1) -> subprocess.Popen:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "support.transport_peer"),
                *(str(self.instance.path), self.instance.instance, str(incarnation), mode),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'test'}"},
        )
        self.children.append(child)
        assert line(child) == "up"
        self.here.meet(1, self.instance.address("w1", incarnation), incarnation)
        return child

    def send_1_mib(self) -> str:
        tensor = torch.randn(NUM_FLOATS)
        ids = [self.here.store.put(tensor)]
        self.here.transport.send(routed(self.here.store, 1, edges=[(self.handle, 0, ids)]))
        return digest(tensor)

    def pump_until_acknowledged(self) -> None:
        while self.here.arena.num_tickets:
            assert self.here.bus.wait(20), "no acknowledgement"
            self.here.pump()
        self.here.transport.rest()

    def lose(self, child: subprocess.Popen, incarnation: int = 1) -> None:
        """As the supervisor does it."""
        child.send_signal(signal.SIGKILL)
        child.wait()
        reclaim(self.instance.instance, 1, incarnation)
        self.here.transport.peer_lost(PeerLost(1, incarnation, "killed"))
        self.here.transport.rest()

    def shm_bytes(self) -> int:
        names = f"mstar-{os.getuid()}-{self.instance.instance}-*"
        return sum(path.stat().st_blocks * 512 for path in SHM_DIR.glob(names))

    def close(self) -> None:
        for child in self.children:
            child.kill()
            with child:  # closes its pipes and waits
                pass
        self.here.close()
        self.instance.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()
    reclaim(made.instance.instance, 1, 1)
    reclaim(made.instance.instance, 1, 2)
    assert made.shm_bytes() == 0


def line(child: subprocess.Popen) -> str:
    assert child.stdout is not None
    text = child.stdout.readline().strip()
    assert text, f"the peer ended with {child.wait(10)}"
    return text


def removed_maps(pid: int) -> list[str]:
    """Shared memory that a process still holds although its name is gone."""
    return [
        entry
        for entry in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "mstar-" in entry and "deleted" in entry
    ]


def test_1_mib_crosses_in_small_messages_and_leaves_nothing(pair: Pair) -> None:
    child = pair.start("read")
    baseline = pair.shm_bytes()
    assert baseline == 2 * FIRST_BYTES
    for _ in range(3):
        sent = pair.send_1_mib()
        assert pair.shm_bytes() > 1 << 20
        assert line(child) == sent
        pair.pump_until_acknowledged()
        assert pair.shm_bytes() == baseline
    assert pair.here.bus.counters.largest_frame_bytes < 4096
    assert pair.here.store.num_live == 0
    sent = pair.send_1_mib()  # at its rest after this one the peer lets go of what was removed before
    assert line(child) == sent
    pair.pump_until_acknowledged()
    assert len(removed_maps(child.pid)) <= 1
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(20) == 0
    assert pair.shm_bytes() == FIRST_BYTES


def test_a_killed_receiver_frees_what_it_was_to_read(pair: Pair) -> None:
    child = pair.start("hold")
    sent = pair.send_1_mib()
    assert line(child) == sent
    pair.send_1_mib()
    assert pair.here.arena.num_tickets == 2
    pair.lose(child)
    assert (pair.here.arena.num_tickets, pair.here.store.num_live) == (0, 0)
    assert pair.shm_bytes() == FIRST_BYTES
    successor = pair.start("read", incarnation=2)
    sent = pair.send_1_mib()
    assert line(successor) == sent
    pair.pump_until_acknowledged()
    assert pair.shm_bytes() == 2 * FIRST_BYTES


def test_a_killed_senders_values_fail_only_their_request(pair: Pair) -> None:
    child = pair.start("send")
    assert int(line(child)) < 4096
    frames: list[EdgeFrame] = []
    while not frames:
        assert pair.here.bus.wait(20)
        frames += [message for message in pair.here.bus.receive() if isinstance(message, EdgeFrame)]
    pair.lose(child)
    assert pair.shm_bytes() == FIRST_BYTES
    assert pair.here.transport.read_edges(frames[0]).ids == []
    ((rid, detail),) = pair.here.transport.take_failures()
    assert rid == "r0"
    assert "a value from w1 was lost" in detail
    assert pair.here.store.num_live == 0
    successor = pair.start("send", incarnation=2)
    assert int(line(successor)) < 4096
    while not pair.here.edges:
        assert pair.here.bus.wait(20)
        pair.here.pump()
    (tensor_id,) = pair.here.edges[0].ids
    assert torch.equal(pair.here.store.get(tensor_id), torch.arange(NUM_FLOATS, dtype=torch.float32))
    pair.lose(successor, incarnation=2)
    assert removed_maps(os.getpid()) == []
    assert pair.shm_bytes() == FIRST_BYTES
