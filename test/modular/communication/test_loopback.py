"""What the loopback network can do that a real one does on its own: delay, lose, reorder, corrupt."""

import random

import pytest

from mstar.communication import wire
from mstar.communication.loopback import LoopbackBus, LoopbackNet
from mstar.communication.messages import Remove


def three(net: LoopbackNet) -> tuple[LoopbackBus, LoopbackBus, LoopbackBus]:
    buses = tuple(net.bus(name, wire.decode_to_worker) for name in ("a", "b", "c"))
    for bus in buses[:2]:
        bus.connect("c", "c")
    return buses  # pyright: ignore[reportReturnType]


def test_held_messages_come_when_delivered() -> None:
    net = LoopbackNet()
    a, b, c = three(net)
    net.hold("a", "c")
    a.send("c", [Remove("a1"), Remove("a2")])
    a.send("c", [Remove("a3")])
    b.send("c", [Remove("b1")])
    assert c.receive() == [Remove("b1")]
    assert not c.wait(0)
    assert net.pending() == {("a", "c"): 2}
    assert net.deliver("a", "c", 1) == 1
    assert c.receive() == [Remove("a1"), Remove("a2")]
    net.unhold()
    a.send("c", [Remove("a4")])
    assert c.receive() == [Remove("a3"), Remove("a4")]
    assert net.deliver("a", "c") == 0


def test_dropped_messages_never_come() -> None:
    net = LoopbackNet()
    a, _, c = three(net)
    net.hold()
    for i in range(3):
        a.send("c", [Remove(str(i))])
    assert net.drop("a", "c", 1) == 1
    net.unhold()
    assert c.receive() == [Remove("1"), Remove("2")]
    assert net.drop("a", "c") == 0


def test_shuffling_keeps_each_senders_order() -> None:
    orders = set()
    for seed in range(20):
        net = LoopbackNet()
        a, b, c = three(net)
        net.hold()
        for i in range(4):
            a.send("c", [Remove(f"a{i}")])
            b.send("c", [Remove(f"b{i}")])
        assert net.deliver_shuffled(random.Random(seed)) == 8
        got = [message.rid for message in c.receive()]
        assert [rid for rid in got if rid[0] == "a"] == ["a0", "a1", "a2", "a3"]
        assert [rid for rid in got if rid[0] == "b"] == ["b0", "b1", "b2", "b3"]
        orders.add(tuple(got))
    assert len(orders) > 5


def test_corrupt_bytes_fail_only_themselves() -> None:
    net = LoopbackNet()
    a, _, c = three(net)
    a.send("c", [Remove("1")])
    net.corrupt("a", "c", b"\x01nothing")
    a.send("c", [Remove("2")])
    assert c.receive() == [Remove("1"), Remove("2")]
    assert c.counters.num_frames_refused == 1


def test_real_frames_travel() -> None:
    net = LoopbackNet()
    a, _, c = three(net)
    with pytest.raises(TypeError, match="no message"):
        a.send("c", [object()])  # pyright: ignore[reportArgumentType]
    assert c.receive() == []


def test_what_is_under_way_to_a_closed_bus_reaches_its_successor_only_if_still_connected() -> None:
    net = LoopbackNet()
    a, b, c = three(net)
    c.close()
    a.send("c", [Remove("a")])
    b.send("c", [Remove("b")])
    b.disconnect("c")
    assert net.bus("c", wire.decode_to_worker).receive() == [Remove("a")]
