"""Requests in a runtime: walks, persisted signals, gates, failures, removal, values from other workers."""

from __future__ import annotations

import pytest
from support.graph_bench import GraphBench, compile_one, edge, emit, keep, node

from mstar.graph.base import GraphSection, Loop, Parallel, Sequential
from mstar.graph.protocol import NO_TENSOR, Cols, Gate, GraphError, ReadyKey, Routed


def seq(*parts: GraphSection) -> Sequential:
    return Sequential(parts)


def test_persisted_signals_bind_when_a_walk_is_entered() -> None:
    walks: dict[str, GraphSection] = {
        "one": node("a", ("h",), (keep("h"),), optional_inputs=frozenset({"h"})),
        "two": node("b", ("h",), ()),
    }
    bench = GraphBench(compile_one(walks))
    bench.add(7, walk="one")
    assert bench.run("a", "one")[0].ids["h"] == [NO_TENSOR]
    bench.graph.set_walk(7, "main", "one")
    taken, routed = bench.run("a", "one")
    assert taken.ids["h"] == [1]
    assert routed.freed == [1]  # replaced by the new value of the name
    bench.graph.set_walk(7, "main", "two")
    assert bench.run("b", "two")[0].ids["h"] == [2]
    assert list(bench.books.values) == [2]  # kept for more walks
    bench.books.free(bench.graph.unpersist(7, "main", "h"))
    assert bench.nothing_left()
    assert bench.graph.unpersist(7, "main", "h") == []


def test_a_signal_persisted_in_a_walk_is_for_later_walks() -> None:
    """`b` runs after `a`'s value was kept, and still sees what was bound when the walk began."""
    walks: dict[str, GraphSection] = {
        "w": Parallel((node("a", (), (keep("h"),)), node("b", ("h",), (), optional_inputs=frozenset({"h"}))))
    }
    bench = GraphBench(compile_one(walks))
    bench.add(1, walk="w")
    bench.run("a", "w")
    assert bench.run("b", "w")[0].ids["h"] == [NO_TENSOR]
    bench.graph.set_walk(1, "main", "w")
    bench.run("a", "w")
    assert bench.run("b", "w")[0].ids["h"] == [1]


def test_an_absent_persisted_value_keeps_the_old_one() -> None:
    bench = GraphBench(compile_one({"w": node("a", (), (keep("h"),)), "v": node("b", ("h",), ())}))
    bench.add(1, walk="w")
    bench.run("a", "w")
    bench.graph.set_walk(1, "main", "w")
    bench.complete("a", "w", bench.take("a", "w").rows, h=[NO_TENSOR])
    bench.graph.set_walk(1, "main", "v")
    assert bench.take("b", "v").ids["h"] == [1]


@pytest.mark.parametrize("optional", [False, True])
def test_request_inputs_may_come_before_or_after_the_walk_begins(optional: bool) -> None:
    walks: dict[str, GraphSection] = {
        "w": node("a", ("x",), (), optional_inputs=frozenset({"x"} if optional else set()))
    }
    bench = GraphBench(compile_one(walks, ("x",)))
    ids = bench.put(3)
    bench.graph.persist(1, "main", "x", ids[0])
    bench.add(1, 2, walk="w")
    assert bench.ready() == [("a", [1, 2] if optional else [1])]
    bench.graph.persist(2, "main", "x", ids[1])
    assert bench.take("a", "w").ids["x"] == ids[:2]
    bench.graph.persist(2, "main", "x", ids[2])  # taken: this one is for a later walk
    bench.complete("a", "w", [1, 2])
    bench.graph.set_walk(2, "main", "w")
    assert bench.take("a", "w").ids["x"] == [ids[2]]


def test_a_request_input_that_no_node_takes_here_is_freed() -> None:
    bench = GraphBench(compile_one({"w": node("a", ("x",), ())}, ("x",)))
    (one,) = bench.put()
    bench.graph.persist(1, "main", "media", one)
    assert bench.collect().freed == [one]


def test_walks_are_entered_one_at_a_time() -> None:
    bench = GraphBench(compile_one({"w": node("a"), "v": node("b")}))
    bench.add(1, walk="w")
    assert not bench.graph.partition_idle(1, "main")
    with pytest.raises(GraphError, match="cannot enter 'v': its walk 'w' has not ended"):
        bench.graph.set_walk(1, "main", "v")
    with pytest.raises(GraphError, match="is in a walk of partition 'main'"):
        bench.graph.end_streams(1, "main", Routed())
    bench.run("a", "w")
    assert bench.graph.partition_idle(1, "main")
    with pytest.raises(GraphError, match="has no walk 'u'"):
        bench.graph.set_walk(1, "main", "u")
    bench.graph.set_walk(1, "main", "v")
    assert bench.ready() == [("b", [1])]
    bench.run("b", "v")
    bench.graph.end_streams(1, "main", Routed())
    with pytest.raises(GraphError, match="has finished partition 'main'"):
        bench.graph.set_walk(1, "main", "w")


def test_wrong_arguments_of_add() -> None:
    bench = GraphBench(compile_one({"w": node("a")}))
    bench.add(1, walk="w")
    for handle, partition, walk, message in (
        (1, "main", "w", "handle 1 has started or finished partition 'main' already"),
        (2, "side", "w", "there is no partition 'side'"),
        (2, "main", "v", "has no walk 'v'"),
        (2, "main", None, "is not stream-fed: name its first walk"),
    ):
        with pytest.raises(GraphError, match=message):
            bench.graph.add(handle, partition, walk, {})
    elsewhere = GraphBench(compile_one({"w": node("a")}, placement={"a": 1}))
    with pytest.raises(GraphError, match="worker 0 has no node of partition 'main'"):
        elsewhere.add(1, walk="w")


def test_unknown_keys_and_handles_are_errors() -> None:
    bench = GraphBench(compile_one({"w": node("a")}))
    key = ReadyKey("b", "w")
    for call in (
        lambda: bench.graph.peek(key, 1),
        lambda: bench.graph.take(key, [1]),
        lambda: bench.graph.complete(key, [1], {}, Routed()),
        lambda: bench.graph.speculate_node(key, [1]),
    ):
        with pytest.raises(GraphError, match="this worker does not run 'b' in walk 'w'"):
            call()
    for call in (
        lambda: bench.graph.remove(1),
        lambda: bench.graph.set_walk(1, "main", "w"),
        lambda: bench.graph.fail([1]),
        lambda: bench.graph.partition_idle(1, "main"),
        lambda: bench.graph.unpersist(1, "main", "x"),
        lambda: bench.graph.complete(ReadyKey("a", "w"), [1], {}, Routed()),
    ):
        with pytest.raises(GraphError, match="handle 1 is unknown"):
            call()


def test_gates_add_up_and_rows_return_to_their_place() -> None:
    bench = GraphBench(compile_one({"w": Loop(node("a"), 9, name="l")}))
    bench.add(1, 2, 3, walk="w")
    bench.graph.gate([1], Gate.HELD | Gate.REMOVING, True)
    bench.graph.gate([1], Gate.HELD, False)
    assert bench.ready() == [("a", [2, 3])]
    bench.graph.gate([1], Gate.STREAM_FULL, True, partition="main")
    bench.graph.gate([1], Gate.REMOVING, False)
    assert bench.ready() == [("a", [2, 3])]
    bench.graph.gate([1], Gate.STREAM_FULL, False, partition="main")
    assert bench.ready() == [("a", [1, 2, 3])]
    bench.take("a", "w", 1)
    bench.graph.gate([1], Gate.HELD, True)  # while it runs
    bench.complete("a", "w", [1])
    assert bench.ready() == [("a", [2, 3])]
    bench.graph.gate([1], Gate.HELD, False)
    assert bench.ready() == [("a", [2, 3, 1])]


def test_a_gate_holds_for_partitions_added_later() -> None:
    bench = GraphBench(compile_one({"w": node("a", ("x",), ())}, ("x",)))
    bench.graph.persist(1, "main", "x", bench.put()[0])
    bench.graph.gate([1], Gate.HELD, True)
    bench.add(1, walk="w")
    assert bench.ready() == []
    bench.graph.gate([1], Gate.HELD, False)
    assert bench.ready() == [("a", [1])]


def test_a_failed_row_is_dropped_from_other_steps() -> None:
    """Its outputs are freed and lead nowhere; the other rows of the step are completed."""
    walks: dict[str, GraphSection] = {"w": Parallel((node("a", (), (emit("x"),)), node("b", (), (emit("y"),))))}
    bench = GraphBench(compile_one(walks))
    bench.add(1, 2, walk="w")
    bench.take("a", "w")
    bench.take("b", "w")
    bench.graph.fail([1])
    routed = bench.complete("b", "w", [1, 2], y=bench.put(2))
    assert routed.emits[0].handles == [2] and routed.emits[0].ids == [2]
    assert routed.freed == [1]
    bench.release_outgoing(routed)
    routed = bench.complete("a", "w", [2], x=bench.put())
    assert routed.walk_done == [(2, "main")]
    bench.release_outgoing(routed)
    bench.remove(1, 2)
    assert bench.nothing_left()


def test_removal_frees_everything_and_only_outside_steps() -> None:
    inner = Loop(node("a", ("h", "x"), (edge("a", "x"),)), 5, (edge("__empty__", "x"),), "l", frozenset({"x"}))
    bench = GraphBench(compile_one({"w": inner, "v": node("b", ("p",), ())}, ("h", "x", "p")))
    for name, one in zip(("h", "x", "p"), bench.put(3), strict=True):
        bench.graph.persist(1, "main", name, one)
    bench.add(1, walk="w")
    bench.run("a", "w")
    taken = bench.take("a", "w")
    with pytest.raises(GraphError, match="handle 1 is in a step of partition 'main'"):
        bench.graph.remove(1)
    bench.finish(taken)
    freed = bench.graph.remove(1)
    assert sorted(freed) == sorted(bench.books.values)
    bench.books.free(freed)
    assert bench.ready() == []
    bench.add(1, walk="w")  # the handle may be used again, with nothing left of before
    assert bench.ready() == []


def two_workers() -> dict[str, GraphSection]:
    return {
        "w": seq(
            node("a", ("go",), (edge("b", "x"), edge("c", "y"))),
            node("b", ("x",), (edge("c", "z"),)),
            node("c", ("y", "z"), (emit("out"),)),
        ),
        "v": node("a", ("go",), ()),
    }


def test_values_cross_between_workers() -> None:
    graph = compile_one(two_workers(), ("go",), placement={"b": 1})
    left, right = GraphBench(graph, 0), GraphBench(graph, 1)
    left.graph.persist(1, "main", "go", left.put()[0])
    left.add(1, walk="w")
    right.add(4, walk="w")  # handles are each worker's own
    taken = left.take("a", "w")
    x, y = left.put(2)
    routed = left.complete("a", "w", taken.rows, x=[x], y=[y])
    slot = left.slot("w", "b", "x")
    assert routed.edges == {1: ([1], [slot], [x], [1])}
    assert not routed.walk_done
    left.release_outgoing(routed)
    assert x not in left.books.values and y in left.books.values
    assert right.graph.ingest(Cols([4], [slot], right.put())) == []
    taken, routed = right.run("b", "w")
    assert routed.walk_done == [(4, "main")]
    assert right.collect().walk_done == []
    right.release_outgoing(routed)
    assert right.nothing_left()
    left.graph.ingest(Cols([1], [left.slot("w", "c", "z")], left.put(), [1]))
    _, routed = left.run("c", "w")
    assert routed.walk_done == [(1, "main")]


def test_values_for_a_later_walk_wait_and_unknown_requests_are_refused() -> None:
    graph = compile_one(two_workers(), ("go",), placement={"b": 1})
    bench = GraphBench(graph, 1)
    slot = bench.slot("w", "b", "x")
    ids = bench.put(4)
    assert bench.graph.ingest(Cols([1, 2], [slot, slot], ids[:2])) == [0, 1]
    bench.books.free(ids[:2])  # the caller's to keep
    bench.add(2, walk="w")
    assert bench.graph.ingest(Cols([1, 2, 2], [slot] * 3, [9, *ids[2:]])) == [0]
    taken, _ = bench.run("b", "w")
    assert taken.ids["x"] == [ids[2]]  # the second value is for the walk's next time
    assert bench.ready() == []
    bench.graph.set_walk(2, "main", "w")
    assert bench.run("b", "w")[0].ids["x"] == [ids[3]]


def test_a_walk_waits_for_every_value_that_others_send() -> None:
    """The loop is skipped, so nothing here reads the value; it must not be taken for one of the next time."""
    walks: dict[str, GraphSection] = {
        "w": seq(node("a", (), (edge("b", "x"), keep("h"))), Loop(node("b", ("x",), ()), 0, name="l")),
        "v": node("b", ("h",), ()),
    }
    bench = GraphBench(compile_one(walks, placement={"a": 1}))
    bench.add(1, walk="w")
    assert not bench.graph.partition_idle(1, "main")
    bench.graph.ingest(Cols([1], [bench.slot("w", "b", "x")], bench.put()))
    assert bench.collect().freed == [1]
    assert not bench.graph.partition_idle(1, "main")
    bench.graph.ingest(Cols([1], [bench.slot("w", "", "h")], bench.put()))
    assert bench.collect().walk_done == [(1, "main")]
    bench.graph.set_walk(1, "main", "v")
    assert bench.take("b", "v").ids["h"] == [2]


def test_a_worker_without_a_node_of_the_walk_reports_it_at_once() -> None:
    graph = compile_one({"w": node("a"), "v": node("b")}, placement={"b": 1})
    bench = GraphBench(graph, 1)
    bench.add(1, walk="w")
    assert bench.graph.partition_idle(1, "main")
    assert bench.collect().walk_done == [(1, "main")]
    bench.graph.set_walk(1, "main", "v")
    assert bench.ready() == [("b", [1])]


def test_wrong_columns_of_ingest() -> None:
    bench = GraphBench(compile_one(two_workers(), ("go",), placement={"b": 1}), 1)
    bench.add(1, walk="w")
    with pytest.raises(GraphError, match="columns of different lengths"):
        bench.graph.ingest(Cols([1], [0, 0], [1], [1]))
    with pytest.raises(GraphError, match="columns of different lengths"):
        bench.graph.ingest(Cols([1], [0], [1, 2], [1]))
    with pytest.raises(GraphError, match="a slot is outside the table"):
        bench.graph.ingest(Cols([1], [99], [1], [1]))


def test_the_oldest_row_decides_the_order_of_keys() -> None:
    bench = GraphBench(compile_one({"w": seq(node("a", (), (edge("b", "x"),)), node("b", ("x",), ()))}))
    bench.add(1, 2, walk="w")
    bench.run("a", "w", 1)
    assert bench.ready() == [("a", [2]), ("b", [1])]
    bench.add(3, walk="w")
    bench.run("a", "w", 2)
    assert bench.ready() == [("b", [1, 2]), ("a", [3])]
