"""Cases G1 to G7: small inputs to a graph runtime and scheduler that broke other servers."""

from __future__ import annotations

import pytest
from support.graph_bench import GraphBench, compile_one, edge, emit, node

from mstar.graph.base import Loop, Sequential
from mstar.graph.protocol import Cols, Gate, GraphError, ReadyKey
from mstar.streaming.chunk_policy import fixed
from mstar.streaming.topology import Connection, Partition, PartitionTopology


def test_g1_a_loop_back_waits_while_its_slot_is_full() -> None:
    """`b` does not wait for `a`, and finishes first: its loop-back to `a` finds `a`'s present input unread."""
    body = Sequential((node("a", ("x",), (emit("y"),)), node("b", (), (edge("a", "x"),))))
    bench = GraphBench(compile_one({"w": Loop(body, 2, name="l")}, ("x",)))
    (first,) = bench.put()
    bench.graph.persist(5, "main", "x", first)
    bench.add(5, walk="w")
    assert dict(bench.ready()) == {"a": [5], "b": [5]}
    taken = bench.take("b", "w")
    (renewed,) = bench.put()
    bench.complete("b", "w", taken.rows, x=[renewed])
    assert bench.ready() == [("a", [5])]  # once, for the present iteration
    taken, routed = bench.run("a", "w")
    assert taken.ids["x"] == [first]
    assert dict(bench.ready()) == {"a": [5], "b": [5]}  # the second iteration
    assert bench.take("a", "w").ids["x"] == [renewed]
    bench.release_outgoing(routed)


def test_g2_a_second_completion_is_an_error() -> None:
    bench = GraphBench(compile_one({"w": Loop(node("a", (), (emit("y"),)), 3, name="l")}))
    bench.add(1, 2, walk="w")
    taken, _ = bench.run("a", "w")
    with pytest.raises(GraphError, match="row 1 is in no step; it was completed already"):
        bench.complete("a", "w", [1], y=bench.put())
    with pytest.raises(GraphError, match="listed twice"):
        bench.take("a", "w")
        bench.complete("a", "w", [1, 1], y=bench.put(2))
    assert bench.complete("a", "w", taken.rows, y=bench.put(2)).emits[0].handles == [1, 2]  # counted once
    assert bench.take("a", "w").iterations == [2, 2]


def test_g3_no_work_is_made_for_a_request_that_is_being_removed() -> None:
    bench = GraphBench(compile_one({"w": node("a", (), (emit("y"),))}))
    bench.add(1, 2, 3, walk="w")
    bench.graph.gate([2], Gate.REMOVING, True)
    assert bench.ready() == [("a", [1, 3])]
    with pytest.raises(GraphError, match=r"rows \[2\] are not ready"):
        bench.take("a", "w", 2)
    bench.graph.gate([1, 3], Gate.REMOVING, True)
    assert bench.ready() == []
    assert bench.graph.peek(ReadyKey("a", "w"), 3) == []
    bench.remove(1, 2, 3)
    assert bench.nothing_left()


def test_g4_a_batch_whose_rows_all_fail_before_launch_leaves_no_step() -> None:
    bench = GraphBench(compile_one({"w": Loop(node("a", (), (emit("y"),)), 3, name="l")}))
    bench.add(1, 2, walk="w")
    taken = bench.take("a", "w")
    bench.graph.fail(taken.rows)
    assert bench.ready() == []
    assert bench.graph.speculate_node(taken.key, taken.rows) == []
    routed = bench.complete("a", "w", taken.rows, y=bench.put(2))
    assert not routed.emits and not routed.walk_done
    bench.remove(1, 2)
    assert bench.nothing_left()


def test_g5_rows_that_do_not_fit_keep_their_place() -> None:
    bench = GraphBench(compile_one({"w": node("a", (), (emit("y"),))}))
    bench.add(*range(1, 8), walk="w")
    key = ReadyKey("a", "w")
    for _ in range(20):
        bench.graph.take(key, [1, 2, 3])
        bench.graph.gate([2], Gate.HELD, True)
        bench.graph.give_back(key, [1, 2, 3])
        assert bench.graph.peek(key, 9) == [1, 3, 4, 5, 6, 7]
        bench.graph.gate([2], Gate.HELD, False)
        assert bench.graph.peek(key, 9) == [1, 2, 3, 4, 5, 6, 7]
    bench.add(8, walk="w")
    served = [row for _ in range(4) for row in bench.run("a", "w", *bench.graph.peek(key, 2))[0].rows]
    assert served == [1, 2, 3, 4, 5, 6, 7, 8]


def test_g6_an_inner_last_iteration_that_is_the_outer_last() -> None:
    """The outer loop passes on what the inner one gives at its end, so both sets of outputs come out at once."""
    inner = Loop(node("a", (), (emit("step"), edge("__empty__", "last"))), 2, (edge("__empty__", "last"),), "inner")
    outer = Loop(inner, 2, (emit("last"),), "outer")
    bench = GraphBench(compile_one({"w": outer}))
    bench.add(1, walk="w")
    for _ in range(3):
        _, routed = bench.run("a", "w")
        assert [columns.signal for columns in routed.emits] == ["step"]
        assert not routed.walk_done
        bench.release_outgoing(routed)
    taken = bench.take("a", "w")
    step, last = bench.put(2)
    routed = bench.complete("a", "w", taken.rows, step=[step], last=[last])
    assert {columns.signal: columns.ids for columns in routed.emits} == {"step": [step], "last": [last]}
    assert routed.walk_done == [(1, "main")]
    bench.release_outgoing(routed)
    bench.remove(1)
    assert bench.nothing_left()


def test_g7_a_node_lacking_an_input_leaves_its_chunk_in_the_buffer() -> None:
    walks = {
        "make": Loop(node("maker", (), (edge("n", "s", target_partition="use"),)), 9, name="make"),
        "w": Sequential((node("early", (), (edge("n", "b"),)), node("n", ("a", "b", "s"), (emit("y"),)))),
    }
    topology = PartitionTopology(
        (Partition("made", ("make",)), Partition("use", ("w",), request_inputs=("a",))),
        (Connection("made", "use", "n", "s", fixed(1), "w"),),
    )
    bench = GraphBench(compile_one(walks, topology=topology, placement={"maker": 1, "early": 2}))
    (a,) = bench.put()
    bench.graph.persist(1, "use", "a", a)
    bench.add(1, walk="w", partition="use")
    items = bench.put(2)
    assert bench.graph.stream_put([1, 1], [0, 0], items, [1, 1]) == []
    assert bench.ready() == []
    slot = bench.slot("w", "n", "b")
    assert bench.graph.ingest(Cols([1], [slot], bench.put(), [1])) == []
    taken = bench.take("n", "w")
    assert taken.lists["s"] == [[items[0]]]
    bench.graph.give_back(taken.key, [1])
    assert bench.take("n", "w").lists["s"] == [[items[0]]]  # still at the head
    bench.graph.fail([1])
    bench.remove(1)
    bench.collect()
    assert bench.nothing_left()
