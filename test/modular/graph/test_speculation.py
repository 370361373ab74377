"""Speculation: who is offered, what an armed row is spared, what abandoning and settling restore."""

from __future__ import annotations

import pytest
from support.graph_bench import GraphBench, compile_one, edge, emit, keep, node

from mstar.graph.base import GraphSection, Loop, LoopLimit, Sequential
from mstar.graph.protocol import LIVE_COLUMN, Gate, GraphError, ReadyKey, TakenRows
from mstar.streaming.chunk_policy import fixed
from mstar.streaming.topology import Connection, Partition, PartitionTopology

DECODE = ReadyKey("LLM", "decode")


def language_model(async_ok: bool = True) -> dict[str, GraphSection]:
    decode = node("LLM", ("token",), (edge("LLM", "token"), emit("token")), enable_async_scheduling=async_ok)
    return {
        "prefill": node("LLM", (), (keep("token"), emit("token"))),
        "decode": Loop(decode, LoopLimit("n"), name="decode"),
    }


def decoding(*rows: int, n: int = 100, steps: int = 1, disabled: bool = False, async_ok: bool = True) -> GraphBench:
    """Rows that have been prefilled and have decoded a step; the next one is taken."""
    pairs = frozenset({("LLM", "decode")}) if disabled else frozenset()
    bench = GraphBench(compile_one(language_model(async_ok)), disabled=pairs)
    bench.add(*rows, walk="prefill", n=n)
    _, routed = bench.run("LLM", "prefill", live=["token"])
    for handle, partition in routed.walk_done:
        bench.graph.set_walk(handle, partition, "decode")
    for _ in range(steps):
        bench.run("LLM", "decode", live=["token"])
    bench.take("LLM", "decode")
    return bench


def targets(bench: GraphBench, *rows: int) -> list[int]:
    found = bench.graph.speculate_node(DECODE, rows)
    assert len(found) <= 1
    return found[0].rows if found else []


def arm(bench: GraphBench, *rows: int) -> tuple[int, TakenRows]:
    return bench.graph.spec_prepare(DECODE, rows)


def finish(bench: GraphBench, *rows: int) -> None:
    bench.complete("LLM", "decode", rows, token=[LIVE_COLUMN] * len(rows))


def test_an_unbroken_chain() -> None:
    """Each step is armed while the one before runs, and none of its rows passes through the ready index."""
    bench = decoding(1, 2)
    for step in range(5):
        assert targets(bench, 1, 2) == [1, 2]
        spec_id, taken = arm(bench, 1, 2)
        assert taken.rows == [1, 2]
        assert taken.ids == {"token": [LIVE_COLUMN, LIVE_COLUMN]}
        assert taken.iterations == [step + 2, step + 2]
        finish(bench, 1, 2)
        assert bench.ready() == []
        assert bench.graph.spec_going(spec_id) == [1, 2]
        bench.graph.spec_settle(spec_id, [1, 2])
        assert bench.ready() == []
    finish(bench, 1, 2)
    assert bench.ready() == [("LLM", [1, 2])]
    assert bench.take("LLM", "decode").iterations == [7, 7]


def test_the_first_step_of_a_key_is_not_speculated_on() -> None:
    bench = decoding(1, steps=0)
    assert targets(bench, 1) == []
    finish(bench, 1)
    bench.take("LLM", "decode")
    assert targets(bench, 1) == [1]


def test_a_loop_back_that_is_a_tensor_is_not_speculated_on() -> None:
    loop = Loop(node("flow", ("x",), (edge("flow", "x"),)), 9, name="l")
    bench = GraphBench(compile_one({"w": loop}, ("x",)))
    bench.graph.persist(1, "main", "x", bench.put()[0])
    bench.add(1, walk="w")
    for _ in range(3):
        taken = bench.take("flow", "w")
        assert bench.graph.speculate_node(taken.key, [1]) == []
        bench.finish(taken)


@pytest.mark.parametrize(("disabled", "async_ok"), [(True, True), (False, False)])
def test_who_switches_speculation_off(disabled: bool, async_ok: bool) -> None:
    bench = decoding(1, disabled=disabled, async_ok=async_ok)
    assert targets(bench, 1) == []
    with pytest.raises(GraphError, match="is not speculated on"):
        arm(bench, 1)


def test_an_unknown_disabled_pair_is_refused() -> None:
    with pytest.raises(GraphError, match="disable_spec_node_walks names"):
        GraphBench(compile_one(language_model()), disabled=frozenset({("LLM", "encode")}))


def test_never_past_an_end_that_the_host_knows() -> None:
    bench = decoding(1, 2, n=4)
    bench.graph.stop_loops([2], ["decode"])
    assert targets(bench, 1, 2) == [1]
    finish(bench, 1, 2)
    bench.take("LLM", "decode")
    assert targets(bench, 1) == [1]  # iteration 2 runs, 3 is the last
    finish(bench, 1)
    bench.take("LLM", "decode")
    assert targets(bench, 1) == []
    with pytest.raises(GraphError, match=r"rows \[1\] are no targets"):
        arm(bench, 1)


def test_gated_failed_waiting_and_armed_rows_are_no_targets() -> None:
    bench = decoding(1, 2, 3, 4)
    bench.graph.gate([1], Gate.HELD, True)
    bench.graph.fail([2])
    arm(bench, 3)
    bench.add(5, walk="prefill", n=9)
    assert targets(bench, 1, 2, 3, 4, 5, 6) == [4]
    bench.graph.gate([1], Gate.HELD, False)
    assert targets(bench, 1) == [1]


def test_prefill_leads_to_another_walk_and_is_no_target() -> None:
    bench = GraphBench(compile_one(language_model()))
    bench.add(1, walk="prefill", n=9)
    taken = bench.take("LLM", "prefill")
    assert bench.graph.speculate_node(taken.key, [1]) == []


def test_rows_of_a_running_step_that_no_gate_holds_may_go_on_with_their_run() -> None:
    bench = GraphBench(compile_one(language_model()))
    prefill = ReadyKey("LLM", "prefill")
    bench.add(1, 2, 3, 4, 5, walk="prefill", n=9)
    bench.graph.take(prefill, [1, 2, 3, 4])
    bench.graph.gate([2], Gate.HELD, True)
    bench.graph.fail([3])
    assert bench.graph.carriable(prefill, [1, 2, 3, 4, 5, 6]) == [1, 4]
    bench.graph.give_back(prefill, [4])
    assert bench.graph.carriable(prefill, [1, 4]) == [1]
    bench.graph.give_back(prefill, [2])
    assert bench.ready() == [("LLM", [4, 5])], "a held row is given back behind its gate"
    bench.graph.gate([2], Gate.HELD, False)
    assert bench.ready() == [("LLM", [2, 4, 5])], "and stands where it stood"


def test_abandoned_before_routing() -> None:
    """The rows become ready by the routing of the step in flight, as without speculation."""
    bench = decoding(1, 2)
    spec_id, _ = arm(bench, 1, 2)
    bench.graph.spec_settle(spec_id, ())
    assert bench.ready() == []
    assert targets(bench, 1, 2) == [1, 2]  # and may be armed again
    finish(bench, 1, 2)
    assert bench.ready() == [("LLM", [1, 2])]
    with pytest.raises(GraphError, match="unknown or settled already"):
        bench.graph.spec_settle(spec_id, ())


def test_abandoned_after_routing() -> None:
    bench = decoding(1, 2)
    spec_id, _ = arm(bench, 1, 2)
    finish(bench, 1, 2)
    bench.graph.spec_settle(spec_id, ())
    assert bench.ready() == [("LLM", [1, 2])]


def test_a_dynamic_stop_wastes_the_armed_row() -> None:
    bench = decoding(1, 2)
    spec_id, _ = arm(bench, 1, 2)
    bench.graph.stop_loops([1], ["decode"])
    routed = bench.complete("LLM", "decode", [1, 2], token=[LIVE_COLUMN] * 2)
    assert routed.walk_done == [(1, "main")]
    assert not bench.graph.partition_idle(1, "main")  # its wasted step is not settled
    with pytest.raises(GraphError, match="cannot enter 'prefill'"):
        bench.graph.set_walk(1, "main", "prefill")
    assert bench.graph.spec_going(spec_id) == [2]
    with pytest.raises(GraphError, match=r"cannot keep the rows \[1\]"):
        bench.graph.spec_settle(spec_id, [1, 2])
    bench.graph.spec_settle(spec_id, [2])
    assert bench.ready() == []
    finish(bench, 2)
    assert bench.ready() == [("LLM", [2])]
    bench.graph.set_walk(1, "main", "prefill")
    assert ("LLM", [1]) in bench.ready()
    with pytest.raises(GraphError, match="row 1 is in no step"):
        finish(bench, 1)


def test_rows_are_kept_only_after_the_step_before_is_routed() -> None:
    bench = decoding(1)
    spec_id, _ = arm(bench, 1)
    assert bench.graph.spec_going(spec_id) == []
    with pytest.raises(GraphError, match="the step before is not routed, or"):
        bench.graph.spec_settle(spec_id, [1])
    with pytest.raises(GraphError, match=r"cannot keep the rows \[2\]"):
        bench.graph.spec_settle(spec_id, [2])
    finish(bench, 1)
    bench.graph.spec_settle(spec_id, [1])


def test_a_failed_row_leaves_every_step() -> None:
    bench = decoding(1, 2)
    spec_id, _ = arm(bench, 1, 2)
    bench.graph.fail([1])
    finish(bench, 2)
    bench.remove(1)  # before the settling: no step of the graph holds it
    assert bench.graph.spec_going(spec_id) == [2]
    bench.graph.spec_settle(spec_id, [2])
    finish(bench, 2)
    assert bench.ready() == [("LLM", [2])]


def test_an_armed_row_cannot_be_removed() -> None:
    bench = decoding(1)
    spec_id, _ = arm(bench, 1)
    finish(bench, 1)
    with pytest.raises(GraphError, match="handle 1 is in a step"):
        bench.graph.remove(1)
    bench.graph.spec_settle(spec_id, ())
    bench.remove(1)


def test_a_speculated_value_must_turn_out_live() -> None:
    bench = decoding(1)
    spec_id, _ = arm(bench, 1)
    with pytest.raises(GraphError, match="row 1 was speculated on, but its value is not live"):
        bench.complete("LLM", "decode", [1], token=bench.put())
    bench.graph.spec_settle(spec_id, ())
    bench.complete("LLM", "decode", [1], token=[1])
    assert bench.take("LLM", "decode").ids["token"] == [1]
    assert targets(bench, 1) == []  # learned: no longer live


def test_a_speculated_step_cannot_be_given_back() -> None:
    bench = decoding(1)
    spec_id, _ = arm(bench, 1)
    finish(bench, 1)
    bench.graph.spec_settle(spec_id, [1])
    with pytest.raises(GraphError, match="came from a speculation"):
        bench.graph.give_back(DECODE, [1])


def test_held_inputs_reach_the_speculated_step_and_other_members_must_be_done() -> None:
    """`llm` goes on when `side`, which reads nothing of it, has run in the present iteration."""
    llm = node("llm", ("text", "token"), (edge("llm", "token"),), optional_inputs=frozenset({"token"}))
    loop = Loop(Sequential((llm, node("side", ("text",), ()))), 9, name="l")
    bench = GraphBench(compile_one({"w": loop}, ("text",)))
    (text,) = bench.put()
    bench.graph.persist(1, "main", "text", text)
    bench.add(1, walk="w")
    bench.run("llm", "w", live=["token"])
    bench.run("side", "w")
    taken = bench.take("llm", "w")
    assert bench.graph.speculate_node(taken.key, [1]) == []
    bench.run("side", "w")
    assert bench.graph.speculate_node(taken.key, [1]) == [(taken.key, [1])]
    spec_id, armed = bench.graph.spec_prepare(taken.key, [1])
    assert armed.ids == {"text": [text], "token": [LIVE_COLUMN]}
    bench.finish(taken, live=["token"])
    bench.graph.spec_settle(spec_id, [1])
    assert bench.ready() == [("side", [1])]


def test_a_tensor_from_another_member_that_has_arrived_may_be_used() -> None:
    """The next iteration's `x` is made by `b`, which has run: `a` can be speculated on."""
    a = node("a", ("x", "token"), (edge("a", "token"),), optional_inputs=frozenset({"token"}))
    loop = Loop(Sequential((a, node("b", (), (edge("a", "x"),)))), 9, name="l")
    bench = GraphBench(compile_one({"w": loop}, ("x",)))
    bench.graph.persist(1, "main", "x", bench.put()[0])
    bench.add(1, walk="w")
    bench.run("a", "w", live=["token"])
    bench.run("b", "w")
    taken = bench.take("a", "w")
    assert taken.ids["x"] == [2]
    assert bench.graph.speculate_node(taken.key, [1]) == []
    bench.run("b", "w")
    assert bench.graph.speculate_node(taken.key, [1]) == [(taken.key, [1])]
    _, armed = bench.graph.spec_prepare(taken.key, [1])
    assert armed.ids["x"] == [3]


def test_an_inner_loop_that_restarts_is_not_gone_on_with() -> None:
    """The armed step is for iteration 1; after a stop the loop is at iteration 0 again."""
    bench = GraphBench(compile_one({"w": Loop(Loop(node("a"), 5, name="inner"), 5, name="outer")}))
    bench.add(1, walk="w")
    taken = bench.take("a", "w")
    spec_id, armed = bench.graph.spec_prepare(taken.key, [1])
    assert armed.iterations == [1]
    bench.graph.stop_loops([1], ["inner"])
    bench.finish(taken)
    assert bench.graph.spec_going(spec_id) == []
    assert bench.ready() == []
    bench.graph.spec_settle(spec_id, ())
    assert bench.take("a", "w").iterations == [0]


def test_a_restarted_loop_begins_with_the_value_from_outside_although_its_loop_back_is_live() -> None:
    inner = Loop(node("a", ("x",), (edge("a", "x"),)), 3, name="inner")
    bench = GraphBench(compile_one({"w": Loop(inner, 2, name="outer")}, ("x",)))
    bench.graph.persist(1, "main", "x", bench.put()[0])
    bench.add(1, walk="w")
    seen = [bench.run("a", "w", live=["x"])[0].ids["x"][0] for _ in range(6)]
    assert seen == [1, LIVE_COLUMN, LIVE_COLUMN] * 2


def test_a_stop_of_the_outer_loop_leaves_the_armed_row_going() -> None:
    bench = GraphBench(compile_one({"w": Loop(Loop(node("a"), 2, name="inner"), 5, name="outer")}))
    bench.add(1, walk="w")
    taken = bench.take("a", "w")
    spec_id, _ = bench.graph.spec_prepare(taken.key, [1])
    bench.graph.stop_loops([1], ["outer"])
    bench.finish(taken)
    assert bench.graph.spec_going(spec_id) == [1]
    bench.graph.spec_settle(spec_id, [1])
    assert bench.complete("a", "w", [1]).walk_done == [(1, "main")]


def test_stream_chunks_of_a_speculated_step() -> None:
    """A chunk must be there; it goes back to the head of its buffer when the step is abandoned."""
    reader = node("reader", ("token", "s"), (edge("reader", "token"),), optional_inputs=frozenset({"token"}))
    walks: dict[str, GraphSection] = {
        "make": Loop(node("maker", (), (edge("reader", "s", target_partition="use"),)), 9, name="make"),
        "read": Loop(reader, 9, name="read"),
    }
    topology = PartitionTopology(
        (Partition("made", ("make",)), Partition("use", ("read",))),
        (Connection("made", "use", "reader", "s", fixed(1), "read"),),
    )
    bench = GraphBench(compile_one(walks, topology=topology, placement={"maker": 1}))
    bench.add(1, walk="read", partition="use")
    items = bench.put(4)

    def arrive(one: int) -> None:
        bench.graph.stream_put([1], [0], [one], [1])

    arrive(items[0])
    assert bench.ready() == []  # not known yet whether it is the last
    arrive(items[1])
    bench.run("reader", "read", live=["token"])
    assert bench.ready() == []
    arrive(items[2])
    taken = bench.take("reader", "read")
    assert taken.lists["s"] == [[items[1]]]
    assert bench.graph.speculate_node(taken.key, [1]) == []
    arrive(items[3])
    spec_id, armed = bench.graph.spec_prepare(taken.key, [1])
    assert armed.lists["s"] == [[items[2]]]
    bench.graph.spec_settle(spec_id, ())
    spec_id, armed = bench.graph.spec_prepare(taken.key, [1])
    assert armed.lists["s"] == [[items[2]]]
    routed = bench.finish(taken, live=["token"])
    assert routed.freed == [items[1]] and routed.credits == {1: ([1], [0], [1])}
    bench.graph.spec_settle(spec_id, [1])
    bench.graph.stream_end(1, 0, 4)
    spec_id, armed = bench.graph.spec_prepare(taken.key, [1])
    assert armed.lists["s"] == [[items[3]]] and armed.finals == [True]
    bench.graph.stop_loops([1], ["read"])
    bench.complete("reader", "read", [1], token=[LIVE_COLUMN])
    bench.graph.spec_settle(spec_id, ())
    assert list(bench.books.values) == [items[3]]  # wasted: still at the head
    bench.remove(1)
    assert bench.nothing_left()


def test_a_persisted_live_value_serves_one_walk() -> None:
    """After `LLM` has run, its column holds something else."""
    walks = language_model() | {"again": node("LLM", ("token",), ())}
    bench = GraphBench(compile_one(walks))
    bench.add(1, walk="prefill", n=1)
    bench.run("LLM", "prefill", live=["token"])
    bench.graph.set_walk(1, "main", "decode")
    assert bench.run("LLM", "decode", live=["token"])[0].ids["token"] == [LIVE_COLUMN]
    with pytest.raises(GraphError, match="takes 'token', a live value whose node has run since"):
        bench.graph.set_walk(1, "main", "again")
    bench.graph.set_walk(1, "main", "prefill")
    bench.run("LLM", "prefill", live=["token"])
    bench.graph.set_walk(1, "main", "again")
    assert bench.take("LLM", "again").ids["token"] == [LIVE_COLUMN]
