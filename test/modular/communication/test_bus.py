"""Both buses behind the same protocol: order, loss, refusal, waiting, and the event loop of the front."""

import asyncio
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from mstar.communication import wire
from mstar.communication.bus import MAX_DRAINED, Bus, ZmqBus
from mstar.communication.loopback import LoopbackNet
from mstar.communication.messages import EmitFrame, Hello, Remove, Shutdown, Stop
from mstar.communication.wakeup import Wakeup

MakeBus = Callable[[str], Bus]


@pytest.fixture(params=["zmq", "loopback"])
def make_bus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeBus]:
    net = LoopbackNet()
    made: list[Bus] = []

    def make(name: str) -> Bus:
        address = f"ipc://{tmp_path}/{name}" if request.param == "zmq" else name
        decode = wire.decode_to_front if name == "front" else wire.decode_to_worker
        bus = ZmqBus(address, decode) if request.param == "zmq" else net.bus(address, decode)
        made.append(bus)
        return bus

    yield make
    for bus in made:
        bus.close()


def take(bus: Bus, count: int, timeout_s: float = 5.0) -> list:
    """Waits for `count` messages; fails when they do not come."""
    got: list = []
    while len(got) < count:
        assert bus.wait(timeout_s), f"only {len(got)} of {count} came"
        got += bus.receive()
    return got


def removes(start: int, stop: int) -> list[Remove]:
    return [Remove(f"r{i}") for i in range(start, stop)]


def test_messages_of_one_sender_arrive_in_order(make_bus: MakeBus) -> None:
    a, b = make_bus("a"), make_bus("b")
    a.connect("b", b.address)
    assert a.send("b", removes(0, 3))
    assert a.send("b", [])
    assert a.send("b", [Shutdown()])
    assert a.send("b", removes(3, 4))
    assert take(b, 5) == [*removes(0, 3), Shutdown(), *removes(3, 4)]
    assert b.receive() == []
    assert (a.counters.num_sent, a.counters.num_frames_sent, b.counters.num_frames_received) == (3, 5, 5)
    assert a.counters.num_bytes_sent == sum(len(wire.encode(m)) for m in [*removes(0, 4), Shutdown()])
    assert a.counters.largest_frame_bytes == max(len(wire.encode(m)) for m in [*removes(0, 4), Shutdown()])


def test_a_peer_may_listen_later(make_bus: MakeBus, tmp_path: Path) -> None:
    a = make_bus("a")
    address = f"ipc://{tmp_path}/b" if isinstance(a, ZmqBus) else "b"
    a.connect("b", address)
    assert a.send("b", removes(0, 2))
    assert take(make_bus("b"), 2) == removes(0, 2)


def test_send_to_a_stranger_says_so(make_bus: MakeBus) -> None:
    a = make_bus("a")
    assert not a.send("b", removes(0, 1))
    assert a.counters.num_dropped == 1
    a.disconnect("b")


def test_disconnect_drops_what_a_dead_peer_was_to_get(make_bus: MakeBus, tmp_path: Path) -> None:
    a = make_bus("a")
    dead, new = (f"ipc://{tmp_path}/{name}" if isinstance(a, ZmqBus) else name for name in ("w1.0", "w1.1"))
    a.connect("w1", dead)
    for _ in range(1000):
        assert a.send("w1", [Stop("x" * 1000, "main")])
    started = time.monotonic()
    a.connect("w1", new)
    a.send("w1", removes(0, 1))
    b = make_bus("w1.1")
    assert take(b, 1) == removes(0, 1)
    assert b.receive() == []
    a.disconnect("w1")
    assert not a.send("w1", removes(0, 1))
    assert time.monotonic() - started < 5


def test_a_bad_frame_fails_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import zmq

    bus = ZmqBus(f"ipc://{tmp_path}/b", wire.decode_to_worker)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 1000
        socket.connect(f"ipc://{tmp_path}/b")
        front_only = wire.encode(EmitFrame(src=0, rids=[], signals=[], tokens=[]))
        socket.send_multipart([wire.encode(Remove("a")), b"\x80pickle", front_only, b"", wire.encode(Remove("b"))])
        socket.send(b"\x01garbage")
        socket.send(wire.encode(Remove("c")))
        assert take(bus, 3) == [Remove("a"), Remove("b"), Remove("c")]
    assert bus.counters.num_frames_refused == 4
    assert bus.counters.num_frames_received == 7
    assert sum("refused a frame" in line for line in caplog.messages) == 4
    bus.close()


def test_wait_returns_at_once_for_what_came_before(make_bus: MakeBus) -> None:
    a, b = make_bus("a"), make_bus("b")
    a.connect("b", b.address)
    a.send("b", removes(0, 1))
    assert b.wait(5)
    assert b.wait(0), "waiting does not take the message away"
    assert b.receive() == removes(0, 1)
    assert not b.wait(0)
    started = time.monotonic()
    assert not b.wait(0.05)
    assert 0.04 < time.monotonic() - started < 2


def test_no_message_is_slept_over(make_bus: MakeBus) -> None:
    """The inbox's descriptor tells of changes only: a reader that trusts it alone hangs within a few rounds."""
    a, b = make_bus("a"), make_bus("b")
    a.connect("b", b.address)

    def send() -> None:
        for i in range(400):
            a.send("b", removes(i, i + 1))
            if i % 7 == 0:
                time.sleep(0.0005)

    sender = threading.Thread(target=send)
    sender.start()
    assert take(b, 400) == removes(0, 400)
    sender.join()


def test_a_flood_is_taken_in_bounded_parts(make_bus: MakeBus) -> None:
    a, b = make_bus("a"), make_bus("b")
    a.connect("b", b.address)
    for i in range(MAX_DRAINED + 10):
        a.send("b", removes(i, i + 1))
    take_first = []
    while len(take_first) < MAX_DRAINED + 10:
        assert b.wait(5)
        part = b.receive()
        assert len(part) <= MAX_DRAINED
        take_first += part
    assert take_first == removes(0, MAX_DRAINED + 10)


def test_another_thread_wakes_the_waiter(make_bus: MakeBus) -> None:
    bus, wakeup = make_bus("a"), Wakeup()
    timer = threading.Timer(0.05, wakeup.set)
    timer.start()
    assert bus.wait(5, [wakeup.fileno()])
    assert bus.wait(5, [wakeup.fileno()]), "readable until cleared"
    assert wakeup.clear()
    assert not wakeup.clear()
    assert not bus.wait(0, [wakeup.fileno()])
    timer.join()
    wakeup.set()
    other = Wakeup()
    assert not bus.wait(0, [other.fileno()]), "only what is asked for"
    assert not bus.wait(0)
    assert bus.wait(0, [other.fileno(), wakeup.fileno()])
    wakeup.close()
    other.close()


def test_a_signal_handler_wakes_the_waiter(make_bus: MakeBus) -> None:
    bus, wakeup = make_bus("a"), Wakeup()
    before = signal.signal(signal.SIGUSR1, lambda *_: wakeup.set())
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        assert bus.wait(5, [wakeup.fileno()])
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
        wakeup.close()


def test_wakeup_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "eventfd")
    wakeup = Wakeup()
    for _ in range(20_000):  # more than a pipe holds
        wakeup.set()
    while wakeup.clear():
        pass
    wakeup.set()
    assert wakeup.clear()
    assert not wakeup.clear()
    wakeup.close()


def test_wait_on_a_closed_descriptor_is_an_error(tmp_path: Path) -> None:
    bus, wakeup = ZmqBus(f"ipc://{tmp_path}/a", wire.decode), Wakeup()
    fd = wakeup.fileno()
    wakeup.close()
    with pytest.raises(ValueError, match="closed"):
        bus.wait(1, [fd])
    bus.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_attached_to_an_event_loop(make_bus: MakeBus, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    a, front = make_bus("a"), make_bus("front")
    a.connect("front", front.address)
    hellos = [Hello(rank=i, incarnation=0, version="", schema_hash="", pid=i) for i in range(3 * MAX_DRAINED)]
    loop = new_loop()
    got: list = []
    done = asyncio.Event()

    def callback(messages: list) -> None:
        assert messages
        got.extend(messages)
        if len(got) == len(hellos):
            done.set()

    async def run() -> None:
        for hello in hellos[:-300]:  # there before anybody listens: no change will be told
            a.send("front", [hello])
        await asyncio.sleep(0.05)
        front.attach(asyncio.get_running_loop(), callback)
        for i, hello in enumerate(hellos[-300:]):
            a.send("front", [hello])
            if i % 10 == 0:
                await asyncio.sleep(0.001)
        await asyncio.wait_for(done.wait(), 10)

    loop.run_until_complete(run())
    assert got == hellos
    front.close()
    loop.close()


def test_what_came_before_attaching_is_handed_over(make_bus: MakeBus) -> None:
    a, front = make_bus("a"), make_bus("front")
    a.connect("front", front.address)
    hello = Hello(rank=0, incarnation=0, version="", schema_hash="", pid=1)
    a.send("front", [hello])
    assert front.wait(5), "which also takes the change off the descriptor"

    async def run() -> list:
        got: asyncio.Future[list] = asyncio.get_running_loop().create_future()
        front.attach(asyncio.get_running_loop(), got.set_result)
        return await asyncio.wait_for(got, 5)

    assert asyncio.run(run()) == [hello]


def test_close_waits_a_while_for_a_peer_that_is_starting(tmp_path: Path) -> None:
    a = ZmqBus(None, wire.decode)
    a.connect("b", f"ipc://{tmp_path}/b")
    a.send("b", removes(0, 100))
    closing = threading.Thread(target=a.close, args=(5.0,))
    closing.start()
    b = ZmqBus(f"ipc://{tmp_path}/b", wire.decode_to_worker)
    assert take(b, 100) == removes(0, 100)
    closing.join()
    b.close()


def test_close_is_quick_and_still_delivers(tmp_path: Path) -> None:
    a, b = ZmqBus(None, wire.decode), ZmqBus(f"ipc://{tmp_path}/b", wire.decode_to_worker)
    assert (a.receive(), a.wait(0)) == ([], False)
    a.connect("b", f"ipc://{tmp_path}/b")
    a.connect("dead", f"ipc://{tmp_path}/dead")
    a.send("b", removes(0, 100))
    a.send("dead", removes(0, 100))
    started = time.monotonic()
    a.close()
    assert time.monotonic() - started < 2
    assert take(b, 100) == removes(0, 100)
    b.close()


def test_attach_needs_an_address() -> None:
    bus = ZmqBus(None, wire.decode)
    with pytest.raises(ValueError, match="address"):
        bus.attach(asyncio.new_event_loop(), lambda _: None)
    bus.close()


def test_an_idle_wait_costs_nothing(tmp_path: Path) -> None:
    bus = ZmqBus(f"ipc://{tmp_path}/a", wire.decode)
    bus.connect("gone", f"ipc://{tmp_path}/gone")
    bus.send("gone", removes(0, 1))
    before = time.process_time()
    bus.wait(1.0)
    assert time.process_time() - before < 0.02
    bus.close()


def test_a_step_of_64_rows_is_encoded_and_sent_in_40_us(tmp_path: Path) -> None:
    sender, front = ZmqBus(None, wire.decode), ZmqBus(f"ipc://{tmp_path}/front", wire.decode_to_front)
    sender.connect("front", f"ipc://{tmp_path}/front")
    frame = EmitFrame(
        src=0, rids=[f"chatcmpl-{i:024x}-0" for i in range(64)], signals=["token"], tokens=list(range(1000, 1064))
    )
    spent_us = []
    for _ in range(300):
        began = time.thread_time_ns()
        sender.send("front", (frame,))
        spent_us.append((time.thread_time_ns() - began) / 1e3)
        front.wait(1)
        front.receive()
    assert statistics.median(spent_us) < 40
    sender.close()
    front.close()
