"""Loops: held inputs, loop-backs, limits, stops, outputs, nesting; ids freed as soon as nobody needs them."""

from __future__ import annotations

import pytest
from support.graph_bench import GraphBench, compile_one, edge, emit, keep, node

from mstar.graph.base import GraphSection, Loop, LoopLimit, Sequential
from mstar.graph.protocol import LIVE_COLUMN, NO_TENSOR, Gate, GraphError, ReadyKey


def seq(*parts: GraphSection) -> Sequential:
    return Sequential(parts)


def with_inputs(bench: GraphBench, handle: int, *names: str) -> list[int]:
    ids = bench.put(len(names))
    for name, one in zip(names, ids, strict=True):
        bench.graph.persist(handle, "main", name, one)
    return ids


def test_held_inputs_stay_and_loop_backs_are_renewed() -> None:
    loop = Loop(node("a", ("text", "x"), (edge("a", "x"),)), 3, name="l")
    bench = GraphBench(compile_one({"w": loop}, ("text", "x")))
    text, x = with_inputs(bench, 1, "text", "x")
    bench.add(1, walk="w")
    bench.books.free(bench.graph.unpersist(1, "main", "x"))
    bench.books.free(bench.graph.unpersist(1, "main", "text"))
    seen = []
    for iteration in range(3):
        taken, routed = bench.run("a", "w")
        assert taken.iterations == [iteration]
        seen.append((taken.ids["text"][0], taken.ids["x"][0]))
    assert seen == [(text, x), (text, 3), (text, 4)]
    assert routed.walk_done == [(1, "main")]
    assert bench.nothing_left()  # the last loop-back and the held input went with the loop
    bench.remove(1)


def test_input_of_a_completed_node_is_freed_at_once() -> None:
    bench = GraphBench(compile_one({"w": seq(node("a", (), (edge("b", "x"),)), node("b", ("x",), ()), node("c"))}))
    bench.add(1, walk="w")
    bench.run("a", "w")
    assert list(bench.books.values) == [1]
    bench.run("b", "w")
    assert bench.nothing_left()
    assert bench.ready() == [("c", [1])]


def test_an_output_without_a_destination_is_freed() -> None:
    bench = GraphBench(compile_one({"w": node("a", (), (edge("__empty__", "x"),))}))
    bench.add(1, walk="w")
    _, routed = bench.run("a", "w")
    assert routed.freed == [1]


def test_an_emitted_tensor_carries_one_reference_for_the_outbox() -> None:
    bench = GraphBench(compile_one({"w": node("a", (), (emit("x"), edge("__empty__", "x")))}))
    bench.add(1, 2, walk="w")
    _, routed = bench.run("a", "w")
    (columns,) = routed.emits
    assert columns == (ReadyKey("a", "w"), "x", "text", [1, 2], [1, 2])
    assert routed.freed == []
    assert bench.books.counts[1] == 1
    bench.release_outgoing(routed)
    assert bench.nothing_left()


def talker() -> Loop:
    """An outer loop of a language model and an inner loop of a code predictor, which reads the model's hidden state and
    gives all its codes back to the model."""
    predictor = Loop(
        node("predictor", ("hidden", "code"), (edge("predictor", "code"),), optional_inputs=frozenset({"code"})),
        3,
        (edge("llm", "code"),),
        "inner",
        frozenset({"code"}),
    )
    llm = node("llm", ("code",), (edge("predictor", "hidden"), emit("token")), optional_inputs=frozenset({"code"}))
    return Loop(seq(llm, predictor), LoopLimit("frames"), name="outer")


def test_nested_loops() -> None:
    bench = GraphBench(compile_one({"w": talker()}))
    bench.add(1, walk="w", frames=2)
    codes: list[int] = []
    for frame in range(2):
        taken = bench.take("llm", "w")
        assert taken.lists["code"] == [codes]
        assert taken.iterations == [frame]
        hidden, token = bench.put(2)
        bench.release_outgoing(bench.complete("llm", "w", [1], hidden=[hidden], token=[token]))
        codes = []
        for step in range(3):
            taken = bench.take("predictor", "w")
            assert taken.iterations == [step]
            assert taken.ids["hidden"] == [hidden]  # held for the inner loop
            assert taken.ids["code"] == [NO_TENSOR if step == 0 else codes[-1]]  # absent again in each outer iteration
            codes += bench.put()
            routed = bench.complete("predictor", "w", [1], code=[codes[-1]])
            assert (hidden in routed.freed) == (step == 2)
    assert routed.walk_done == [(1, "main")]
    assert bench.nothing_left()


def test_a_value_from_outside_both_loops_comes_back_when_the_inner_one_restarts() -> None:
    inner = Loop(node("a", ("x",), (edge("a", "x"), emit("y"))), 2, name="inner")
    bench = GraphBench(compile_one({"w": Loop(seq(inner, node("b")), 2, name="outer")}, ("x",)))
    (x,) = with_inputs(bench, 1, "x")
    bench.add(1, walk="w")
    for _ in range(2):
        taken, routed = bench.run("a", "w")
        assert taken.ids["x"] == [x]
        bench.release_outgoing(routed)
        taken, routed = bench.run("a", "w")
        assert taken.ids["x"] != [x]
        bench.release_outgoing(routed)
        bench.run("b", "w")
    bench.remove(1)
    bench.collect()
    assert bench.nothing_left()


def test_outer_loop_back_feeds_the_inner_loops_first_iteration() -> None:
    inner = Loop(node("a", ("x",), (edge("a", "x"),)), 2, (edge("a", "x"),), "inner")
    bench = GraphBench(compile_one({"w": Loop(inner, 2, name="outer")}, ("x",)))
    (x,) = with_inputs(bench, 1, "x")
    bench.add(1, walk="w")
    seen = [bench.run("a", "w")[0].ids["x"][0] for _ in range(4)]
    assert seen == [x, 2, 3, 4]  # the inner loop's last value, once more through the outer one
    bench.remove(1)
    bench.collect()
    assert bench.nothing_left()


def test_loop_outputs_are_taken_once_from_the_last_iteration() -> None:
    loop = Loop(node("a", (), (edge("__empty__", "x"), emit("y"))), 3, (edge("b", "x"),), "l")
    bench = GraphBench(compile_one({"w": seq(loop, node("b", ("x",), ()))}))
    bench.add(1, walk="w")
    for i in range(3):
        assert bench.ready() == [("a", [1])]
        taken = bench.take("a", "w")
        x, y = bench.put(2)
        routed = bench.complete("a", "w", taken.rows, x=[x], y=[y])
        bench.release_outgoing(routed)
        assert routed.freed == ([] if i == 0 else [x - 2])  # replaced by this iteration's value
    assert bench.take("b", "w").ids["x"] == [x]


def test_accumulated_outputs_leave_as_a_list() -> None:
    loop = Loop(
        node("a", (), (edge("__empty__", "x"),)), LoopLimit("n"), (edge("b", "x"), emit("x")), "l", frozenset({"x"})
    )
    bench = GraphBench(compile_one({"w": seq(loop, node("b", ("x",), ()))}))
    bench.add(1, walk="w", n=3)
    for _ in range(2):
        bench.run("a", "w")
    taken = bench.take("a", "w")
    routed = bench.complete("a", "w", taken.rows, x=bench.put())
    assert routed.emits[0][3:] == ([1, 1, 1], [1, 2, 3])
    taken = bench.take("b", "w")
    assert taken.lists["x"] == [[1, 2, 3]] and "x" not in taken.ids
    bench.release_outgoing(routed)
    assert len(bench.books.values) == 3
    bench.complete("b", "w", [1])
    assert bench.nothing_left()


def test_absent_values_are_left_out_of_a_list() -> None:
    loop = Loop(node("a", (), (edge("__empty__", "x"),)), 3, (emit("x"),), "l", frozenset({"x"}))
    bench = GraphBench(compile_one({"w": loop}))
    bench.add(1, walk="w")
    ids = bench.put(2)
    for x in (ids[0], NO_TENSOR, ids[1]):
        routed = bench.complete("a", "w", bench.take("a", "w").rows, x=[x])
    assert routed.emits[0].ids == ids


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_limits_of_a_request(limit: int) -> None:
    loop = Loop(node("a", (), (emit("y"),)), LoopLimit("n"), name="l")
    bench = GraphBench(compile_one({"w": seq(loop, node("b"))}))
    bench.add(1, walk="w", n=limit)
    runs = 0
    while "a" in dict(bench.ready()):
        bench.run("a", "w")
        runs += 1
    assert runs == limit
    _, routed = bench.run("b", "w")
    assert routed.walk_done == [(1, "main")]


def test_a_skipped_loop_ends_at_once_and_takes_late_edges() -> None:
    """Its outputs are absent; a value for a node in it is dropped, and makes nothing ready."""
    loop = Loop(
        node("a", ("x",), (edge("__empty__", "y"), edge("__empty__", "z"))),
        LoopLimit("n"),
        (edge("b", "y"), edge("b", "z")),
        "l",
        frozenset({"z"}),
    )
    bench = GraphBench(compile_one({"w": seq(node("first", (), (edge("a", "x"),)), loop, node("b", ("y", "z"), ()))}))
    bench.add(1, walk="w", n=0)
    assert dict(bench.ready()) == {"first": [1], "b": [1]}
    taken, routed = bench.run("first", "w")
    assert routed.freed == [1]
    assert bench.ready() == [("b", [1])]
    taken, routed = bench.run("b", "w")
    assert taken.ids["y"] == [NO_TENSOR] and taken.lists["z"] == [[]]
    assert routed.walk_done == [(1, "main")]


def test_skipped_loops_in_an_outer_loop() -> None:
    inner = Loop(node("a", (), (edge("__empty__", "x"),)), LoopLimit("n"), (edge("b", "x"),), "inner")
    outer = Loop(seq(inner, node("b", ("x",), (emit("y"),))), 2, name="outer")
    bench = GraphBench(compile_one({"w": outer}))
    bench.add(1, walk="w", n=0)
    for i in range(2):
        taken, routed = bench.run("b", "w")
        assert taken.iterations == [i] and taken.ids["x"] == [NO_TENSOR]
        bench.release_outgoing(routed)
    assert routed.walk_done == [(1, "main")]


def test_a_loop_of_skipped_loops_is_skipped() -> None:
    inner = Loop(node("a"), LoopLimit("n"), name="inner")
    bench = GraphBench(compile_one({"w": Loop(inner, 1000000, name="outer")}))
    bench.add(1, walk="w", n=0)
    assert bench.ready() == []
    assert bench.collect().walk_done == [(1, "main")]


def test_missing_and_negative_limits_are_refused() -> None:
    bench = GraphBench(compile_one({"w": Loop(node("a"), LoopLimit("n"), name="l")}))
    with pytest.raises(GraphError, match="loop 'l' of walk 'w' needs the limit 'n'"):
        bench.add(1, walk="w", m=3)
    with pytest.raises(GraphError, match="limit 'n' is -1"):
        bench.add(1, walk="w", n=-1)
    with pytest.raises(GraphError, match="handle 1 is unknown"):
        bench.graph.gate([1], Gate.HELD, True)  # nothing was added
    bench.add(1, walk="w", n=1, m=3)
    assert bench.ready() == [("a", [1])]


def test_limits_of_a_later_walk_are_due_when_it_is_entered() -> None:
    walks = {"first": node("a"), "second": Loop(node("a"), LoopLimit("n"), name="l")}
    bench = GraphBench(compile_one(walks))
    bench.add(1, walk="first")
    bench.run("a", "first")
    with pytest.raises(GraphError, match="loop 'l' of walk 'second' needs the limit 'n'"):
        bench.graph.set_walk(1, "main", "second")
    bench.graph.set_limits(1, "main", {"n": 2})
    bench.graph.set_walk(1, "main", "second")
    assert [bench.run("a", "second")[1].walk_done for _ in range(2)] == [[], [(1, "main")]]


def test_a_limit_may_change_before_its_loop_starts() -> None:
    loop = Loop(node("a", (), ()), LoopLimit("n"), name="l")
    bench = GraphBench(compile_one({"w": seq(loop, node("b"))}))
    bench.add(1, walk="w", n=5)
    bench.graph.set_limits(1, "main", {"n": 2})
    bench.run("a", "w")
    with pytest.raises(GraphError, match="loop 'l' of handle 1 has started"):
        bench.graph.set_limits(1, "main", {"n": 9})
    bench.run("a", "w")
    assert bench.ready() == [("b", [1])]
    bench.add(2, walk="w", n=5)
    bench.graph.set_limits(2, "main", {"n": 0})  # its first iteration is ready by now
    assert bench.ready() == [("b", [1, 2])]


def test_a_stop_ends_the_loop_with_the_iteration_reported_next() -> None:
    loop = Loop(node("a", (), (edge("__empty__", "x"),)), 100, (emit("x"),), "l")
    bench = GraphBench(compile_one({"w": loop}))
    bench.add(1, 2, walk="w")
    bench.run("a", "w")
    taken = bench.take("a", "w")
    bench.graph.stop_loops([2], ["l"])
    routed = bench.complete("a", "w", taken.rows, x=bench.put(2))
    assert routed.walk_done == [(2, "main")]
    assert routed.emits[0].handles == [2] and routed.emits[0].ids == [4]
    assert bench.ready() == [("a", [1])]
    bench.graph.stop_loops([2], ["l"])  # it has ended: left alone
    with pytest.raises(GraphError, match="there is no loop 'm'"):
        bench.graph.stop_loops([1], ["m"])


def test_a_stop_of_the_outer_loop_lets_the_inner_one_finish() -> None:
    bench = GraphBench(compile_one({"w": talker()}))
    bench.add(1, walk="w", frames=100)
    taken = bench.take("llm", "w")
    bench.graph.stop_loops([1], ["outer"])
    bench.release_outgoing(bench.finish(taken))
    for _ in range(3):
        _, routed = bench.run("predictor", "w")
    assert routed.walk_done == [(1, "main")]
    assert bench.nothing_left()


def test_members_of_an_iteration_all_run_before_the_next() -> None:
    body = seq(node("a", ("x",), (edge("b", "y"),)), node("b", ("y",), (edge("a", "x"),)), node("c", (), ()))
    bench = GraphBench(compile_one({"w": Loop(body, 2, name="l")}, ("x",)))
    with_inputs(bench, 1, "x")
    bench.add(1, walk="w")
    bench.run("a", "w")
    bench.run("b", "w")
    assert bench.ready() == [("c", [1])]
    bench.run("c", "w")
    assert dict(bench.ready()) == {"a": [1], "c": [1]}


def test_persisted_inside_loops_keeps_the_last_value_only() -> None:
    inner = Loop(node("a", (), (keep("h"),)), 2, name="inner")
    graph = compile_one({"w": Loop(seq(inner, node("z")), 2, name="outer"), "v": node("b", ("h",), ())})
    bench = GraphBench(graph)
    bench.add(1, walk="w")
    for _ in range(2):
        for _ in range(2):
            bench.run("a", "w")
        bench.run("z", "w")
    assert list(bench.books.values) == [4]
    bench.graph.set_walk(1, "main", "v")
    assert bench.take("b", "v").ids["h"] == [4]


def test_live_values_are_never_counted() -> None:
    bench = GraphBench(compile_one({"w": Loop(node("a", ("x",), (edge("a", "x"), emit("x"))), 3, name="l")}, ("x",)))
    with_inputs(bench, 1, "x")
    bench.add(1, walk="w")
    seen = []
    for _ in range(3):
        taken, routed = bench.run("a", "w", live=["x"])
        seen += taken.ids["x"]
        assert routed.emits[0].ids == [LIVE_COLUMN]
    assert seen == [1, LIVE_COLUMN, LIVE_COLUMN]
    bench.remove(1)
    bench.collect()
    assert bench.nothing_left()


def test_a_live_value_that_another_node_reads_is_refused_before_anything_changes() -> None:
    bench = GraphBench(compile_one({"w": seq(node("a", (), (edge("b", "x"),)), node("b", ("x",), ()))}))
    bench.add(1, walk="w")
    taken = bench.take("a", "w")
    with pytest.raises(GraphError, match="'x' is live, but another node reads it"):
        bench.complete("a", "w", taken.rows, x=[LIVE_COLUMN])
    bench.complete("a", "w", taken.rows, x=bench.put())
    assert bench.ready() == [("b", [1])]


@pytest.mark.parametrize(
    ("out", "message"),
    [({"x": [1, 2]}, "'x' has 2 ids for 1 rows"), ({"x": [1], "y": [1]}, r"outputs \['y'\] are not declared")],
)
def test_wrong_output_columns_are_refused(out: dict[str, list[int]], message: str) -> None:
    bench = GraphBench(compile_one({"w": node("a", (), (edge("__empty__", "x"),))}))
    bench.add(1, walk="w")
    bench.put(2)
    taken = bench.take("a", "w")
    with pytest.raises(GraphError, match=message):
        bench.complete("a", "w", taken.rows, **out)
    assert bench.complete("a", "w", taken.rows, x=[1]).walk_done == [(1, "main")]


def test_a_missing_output_column_means_that_no_row_made_a_value() -> None:
    bench = GraphBench(compile_one({"w": seq(node("a", (), (edge("b", "x"), emit("x"))), node("b", ("x",), ()))}))
    bench.add(1, walk="w")
    taken = bench.take("a", "w")
    assert bench.complete("a", "w", taken.rows).emits == []
    assert bench.take("b", "w").ids["x"] == [NO_TENSOR]
