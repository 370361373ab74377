"""What compilation accepts, what its tables say, and what each refusal tells the author."""

from __future__ import annotations

import dataclasses

import pytest
from support.graph_bench import compile_one, edge, emit, keep, node

from mstar.graph.base import EMPTY_DESTINATION, GraphSection, Loop, LoopLimit, Parallel, Sequential
from mstar.graph.compile import CompiledGraph, compile_walks
from mstar.graph.describe import legend
from mstar.graph.protocol import GraphError, ReadyKey, SlotRef
from mstar.streaming.chunk_policy import ChunkPolicy, fixed, sliding
from mstar.streaming.topology import Connection, Partition, PartitionTopology

DECODE = Loop(node("LLM", ("token",), (edge("LLM", "token"), emit("token"))), LoopLimit("n"), name="decode")
PAIRS = fixed(2)
PREFILL = node("LLM", (), (keep("token"), emit("token")))


def seq(*parts: GraphSection) -> Sequential:
    return Sequential(parts)


def refused(walks: dict[str, GraphSection], request_inputs: tuple[str, ...] = (), **more: object) -> str:
    with pytest.raises(GraphError) as caught:
        compile_one(walks, request_inputs, **more)  # type: ignore[arg-type]
    return str(caught.value)


def test_language_model_tables() -> None:
    graph = compile_one({"prefill": PREFILL, "decode": DECODE})
    assert graph.walk_names == ("prefill", "decode")
    assert graph.slots == (SlotRef("decode", "LLM", "token"), SlotRef("prefill", "", "token"))
    assert graph.signals == ("token",)
    assert graph.ranks_of_partition("main") == (0,)
    assert graph.nodes_on(0) == ("LLM",)
    assert graph.nodes_on(1) == ()
    assert graph.keys_on(0) == (ReadyKey("LLM", "prefill"), ReadyKey("LLM", "decode"))
    assert graph.loops_around(ReadyKey("LLM", "decode")) == ("decode",)
    assert graph.loops_around(ReadyKey("LLM", "prefill")) == ()
    assert graph.stored_signals(0) == {"LLM": frozenset()}
    (llm,) = graph.programs["decode", 0].nodes
    assert llm.speculates
    assert llm.self_inputs == ("token",)
    assert graph.programs["decode", 0].externals == ((0, "token", False),)


def test_tables_cannot_be_changed() -> None:
    graph = compile_one({"prefill": PREFILL, "decode": DECODE})
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.walk_names = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.programs["decode", 0].nodes = ()  # type: ignore[misc]


def split_walk() -> dict[str, GraphSection]:
    loop = Loop(
        seq(
            node("b", ("x", "y"), (edge("c", "z"),)), node("c", ("z",), (edge("b", "y"), edge(EMPTY_DESTINATION, "w")))
        ),
        3,
        outputs=(edge("d", "w"),),
        name="bc",
    )
    return {"walk": seq(node("a", ("start",), (edge("b", "x"),)), loop, node("d", ("w",), (emit("out"),)))}


def test_slots_are_the_same_on_every_worker() -> None:
    together = compile_one(split_walk(), ("start", "y"))
    apart = compile_one(split_walk(), ("start", "y"), placement={"a": 2, "d": 1})
    assert together.slots == apart.slots
    assert apart.ranks_of_partition("main") == (0, 1, 2)
    assert set(apart.programs) == {("walk", 0), ("walk", 1), ("walk", 2)}
    (a,) = apart.programs["walk", 2].nodes
    assert a.routes[0].remotes == ((0, apart.slots.index(SlotRef("walk", "b", "x"))),)
    arrivals = apart.programs["walk", 1].arrivals
    assert set(arrivals) == {apart.slots.index(SlotRef("walk", "d", "w"))}
    assert not together.programs["walk", 0].arrivals


def test_persisted_signal_goes_to_every_worker_that_takes_it() -> None:
    walks: dict[str, GraphSection] = {
        "one": node("a", (), (keep("h"),)),
        "two": Parallel((node("b", ("h",), ()), node("c", ("h",), ()), node("d", (), ()))),
    }
    graph = compile_one(walks, placement={"b": 0, "c": 1, "d": 2})
    (op,) = graph.programs["one", 0].nodes[0].routes[0].persists
    slot = graph.slots.index(SlotRef("one", "", "h"))
    assert op.local
    assert op.remotes == ((1, slot),)
    assert graph.programs["one", 1].arrivals[slot].signal == "h"
    assert not graph.programs["one", 2].arrivals


def test_edge_between_parallel_parts_runs_forward_whatever_is_written_first() -> None:
    part = Parallel((node("late", ("x",), (emit("y"),)), node("early", (), (edge("late", "x"),))))
    looped = compile_one({"walk": Loop(part, 2, name="l")})
    late = next(one for one in looped.programs["walk", 0].nodes if one.key.node == "late")
    assert looped.programs["walk", 0].loops[0].promotes == ()
    assert not late.speculates
    compile_one({"walk": part})


@pytest.mark.parametrize(
    ("policy", "credit", "legal"),
    [(fixed(4), 5, True), (fixed(4), 4, False), (sliding(28, 7), 56, True), (sliding(28, 7), 28, False)],
)
def test_credit_covers_a_window(policy: ChunkPolicy, credit: int, legal: bool) -> None:
    walks, topology = talking(policy=policy, credit=credit)
    if legal:
        assert compile_walks(walks, topology, {"talker": 0, "codec": 1}).streams[0].credit == credit
    else:
        assert "raise it to at least" in refused(walks, topology=topology)


def talking(
    policy: ChunkPolicy = PAIRS, credit: int = 256, tag: str | tuple[tuple[str, str], ...] = "decode", **changed: str
) -> tuple[dict[str, GraphSection], PartitionTopology]:
    """A talker whose codes stream to a codec."""
    walks: dict[str, GraphSection] = {
        "speak": Loop(node("talker", (), (edge("codec", "codes", target_partition="audio"),)), 5, name="speak"),
        "decode": node("codec", ("codes",), (emit("wave"),)),
    }
    names = {"producer": "text", "consumer": "audio", "consumer_node": "codec", "signal": "codes"} | changed
    return walks, PartitionTopology(
        (Partition("text", ("speak",)), Partition("audio", ("decode",), stream_fed=True)),
        (Connection(**names, policy=policy, consumer_walk=tag, credit=credit),),
    )


def test_stream_tables() -> None:
    walks, topology = talking()
    graph = compile_walks(walks, topology, {"talker": 0, "codec": 1})
    (stream,) = graph.streams
    assert (stream.producer_rank, stream.consumer_rank, stream.consumer_node) == (0, 1, "codec")
    assert stream.tags == {"speak": "decode"}
    (op,) = graph.programs["speak", 0].nodes[0].routes[0].streams
    assert op == (0, graph.walk_names.index("decode"), 1)
    assert graph.programs["decode", 1].nodes[0].streams == (("codes", 0),)
    assert graph.partition("audio").markers is None


def test_description_names_everything() -> None:
    walks, topology = talking()
    text = compile_walks({**walks}, topology, {"talker": 0, "codec": 1}).describe()
    for part in (
        "partition audio, stream-fed",
        "loop speak, at most 5 times",
        "talker() on worker 0",
        "codec(codes) on worker 1",
        "codes -> stream to codec of audio",
        "wave -> client as text",
        "codes: text -> codec of audio; 2 new items per pass with 0 before them; walk decode; credit 256",
    ):
        assert part in text
    lm = compile_one({"prefill": PREFILL, "decode": DECODE}).describe()
    assert "loop decode, at most the request's n times" in lm
    assert "token -> nowhere, kept for later walks" in lm
    assert [line.split("  ")[0] for line in legend(text)] == ["stream-fed", "credit"]
    assert [line.split("  ")[0] for line in legend(lm)] == ["-> nowhere", "kept"], "of what is there only"


WALK_ERRORS: list[tuple[dict[str, GraphSection], tuple[str, ...], str]] = [
    ({"w": node("a", (), (edge("b", "x"),))}, (), "goes to 'b', which is no node of this walk (it has ['a'])"),
    ({"w": seq(node("a", (), (edge("b", "x"),)), node("b", ("y",), ()))}, ("y",), "whose inputs are ['y']"),
    ({"w": node("a", ("x",), ())}, (), "input 'x' of 'a' in walk 'w' has no source"),
    ({"w": Loop(node("a", ("x",), (edge("a", "x"),)), 3)}, (), "input 'x' of 'a' in walk 'w' has no source"),
    ({"w": node("a", (), (edge("a", "x"),))}, (), "whose inputs are []"),
    ({"w": seq(node("b", ("x",), ()), node("a", (), (edge("b", "x"),)))}, (), "no loop is around both"),
    ({"w": node("a", ("x",), (edge("a", "x"),))}, (), "no loop is around both"),
    (
        {"w": Parallel((node("a", ("x",), (edge("b", "y"),)), node("b", ("y",), (edge("a", "x"),))))},
        (),
        "['a', 'b'] in walk 'w' wait for each other",
    ),
    ({"w": seq(node("a"), node("a"))}, (), "node 'a' of walk 'w' appears twice"),
    ({"w": node("a", ("x", "x"), ())}, (), "lists the input 'x' twice"),
    ({"w": node("a", (), (), optional_inputs=frozenset({"x"}))}, (), "optional_inputs has ['x']"),
    ({"w": node("a", (), (emit("x"), emit("x")))}, (), "has two edges"),
    ({"w": node("a", (), (edge("__emit_to_client__", "x"),))}, (), "without output_modality"),
    ({"w": seq()}, (), "walk 'w' has no node"),
    ({"w": Loop(node("a"), -1, name="l")}, (), "max_iters is -1; it must be 0 or more"),
    ({"w": Loop(seq(), 1, name="l")}, (), "loop 'l' of walk 'w' has no node"),
    (
        {"w": Loop(Loop(node("a"), 1, name="l"), 1, name="l")},
        (),
        "loop 'l' of walk 'w': two loops of the walk have this name",
    ),
    (
        {"w": seq(Loop(node("a"), 1, name="l"), Loop(node("b"), 1, name="l"))},
        (),
        "two loops of the walk have this name",
    ),
    (
        {"w": Loop(node("a", (), (emit("y"),)), 1, (emit("x"),), "l")},
        (),
        "outputs 'x', which nothing directly in it produces (it has ['y'])",
    ),
    (
        {"w": Loop(Loop(node("a", (), (emit("x"),)), 1, name="in"), 1, (emit("x"),), "out")},
        (),
        "an inner loop must list the signal in its own outputs",
    ),
    (
        {"w": Loop(seq(node("a", (), (emit("x"),)), node("b", (), (emit("x"),))), 1, (emit("x"),), "l")},
        (),
        "['a', 'b'] all produce",
    ),
    (
        {"w": Loop(node("a", (), (emit("x"),)), 1, (emit("x"),), "l", frozenset({"z"}))},
        (),
        "accumulated_outputs has ['z']",
    ),
    (
        {"w": seq(Loop(node("a", (), (edge("b", "x"),)), 1, name="l"), node("b", ("x",), ()))},
        (),
        "leaves the loop 'l' for 'b'; list it in that loop's outputs",
    ),
    (
        {"w": seq(node("a", (), (edge("c", "x"),)), node("b", (), (edge("c", "x"),)), node("c", ("x",), ()))},
        (),
        "fed by 'a' and by 'b' in the same iteration",
    ),
    (
        {
            "w": seq(
                node("a", (), (edge("c", "x"),)),
                Loop(seq(node("b", (), (edge("c", "x"),)), node("c", ("x",), ())), 2, name="l"),
            )
        },
        (),
        "fed by 'a' from outside the loop 'l' and again by 'b' in each iteration",
    ),
    (
        {"w": seq(node("a", (), (keep("h"),)), node("b", (), (keep("h"),))), "v": node("c", ("h",), ())},
        (),
        "one value per name is kept",
    ),
    ({"w": node("a", (), (keep("h"),))}, (), "persists ['h'], but no walk of 'main' has an input of that name"),
    ({"w": node("a", (), ())}, ("x",), "lists the request inputs ['x'], which no node takes"),
]


@pytest.mark.parametrize(("walks", "request_inputs", "message"), WALK_ERRORS, ids=[error[2] for error in WALK_ERRORS])
def test_a_wrong_walk_is_refused(walks: dict[str, GraphSection], request_inputs: tuple[str, ...], message: str) -> None:
    assert message in refused(walks, request_inputs)


def test_legal_neighbours_of_the_refused() -> None:
    """Each is a small change of an entry above that makes it right."""
    neighbours: list[tuple[dict[str, GraphSection], tuple[str, ...]]] = [
        ({"w": node("a", ("x",), ())}, ("x",)),
        ({"w": node("a", ("x",), (), optional_inputs=frozenset({"x"}))}, ()),
        ({"w": Loop(node("a", ("x",), (edge("a", "x"),), optional_inputs=frozenset({"x"})), 3)}, ()),
        ({"w": Loop(seq(node("b", ("x",), ()), node("a", (), (edge("b", "x"),))), 2)}, ("x",)),
        ({"w": Loop(node("a"), 0, name="l")}, ()),
        ({"w": Loop(Loop(node("a", (), (emit("x"),)), 1, (emit("x"),), "in"), 1, (emit("x"),), "out")}, ()),
        ({"w": seq(Loop(node("a", (), (emit("x"),)), 1, (edge("b", "x"),), "l"), node("b", ("x",), ()))}, ()),
        ({"w": node("a", (), (keep("h"),)), "v": node("b", ("h",), ())}, ()),
    ]
    for walks, request_inputs in neighbours:
        assert isinstance(compile_one(walks, request_inputs), CompiledGraph)


def test_a_loop_lies_on_one_worker() -> None:
    message = refused(split_walk(), ("start", "y"), placement={"b": 0, "c": 1})
    assert "loop 'bc' of walk 'walk' is split over workers [0, 1] (b on 0, c on 1)" in message


def test_placement_errors() -> None:
    walks: dict[str, GraphSection] = {"w": node("a")}
    topology = PartitionTopology((Partition("main", ("w",)),))
    for placement, message in (
        ({}, "nodes ['a'] are placed on no worker"),
        ({"a": 0, "b": 1}, "the placement names ['b'], which no walk has"),
        ({"a": -1}, "negative rank"),
    ):
        with pytest.raises(GraphError) as caught:
            compile_walks(walks, topology, placement)
        assert message in str(caught.value)


PARTITION_ERRORS: list[tuple[tuple[Partition, ...], str]] = [
    ((Partition("p", ("a", "b")), Partition("p", ("c",))), "partitions ['p'] are declared twice"),
    ((Partition("p", ("a", "b", "c")), Partition("q", ())), "partition 'q' has no walks"),
    ((Partition("p", ("a", "b", "c", "d")),), "lists the walk 'd'; the declared walks are ['a', 'b', 'c']"),
    ((Partition("p", ("a", "b")), Partition("q", ("b", "c"))), "walk 'b' is listed twice"),
    ((Partition("p", ("a", "b")),), "walks ['c'] are in no partition"),
    ((Partition("p", ("a", "c")), Partition("q", ("b",))), "node 'n' appears in partitions 'p' and 'q'"),
    ((Partition("p", ("a", "b")), Partition("q", ("c",))), "loop name 'loop' is used in partitions 'p' and 'q'"),
    ((Partition("p", ("a", "b", "c"), stream_fed=True),), "is stream-fed, but no Connection leads to it"),
]


@pytest.mark.parametrize(("partitions", "message"), PARTITION_ERRORS, ids=[error[1] for error in PARTITION_ERRORS])
def test_wrong_partitions_are_refused(partitions: tuple[Partition, ...], message: str) -> None:
    walks: dict[str, GraphSection] = {"a": node("n"), "b": node("n"), "c": Loop(node("m"), 1)}
    if "loop name" in message:
        walks["b"] = Loop(node("n"), 1)
    assert message in refused(walks, topology=PartitionTopology(partitions))


CONNECTION_ERRORS: list[tuple[dict[str, object], str]] = [
    ({"producer": "video"}, "no Connection of the topology has this signal from 'text'"),
    ({"signal": "code"}, "no Connection of the topology has this signal from 'text'"),
    ({"tag": "speak"}, "consumer_walk names 'speak'; 'audio' has ['decode']"),
    ({"tag": (("other", "decode"),)}, "consumer_walk names no walk for items of the walk 'speak'"),
    ({"policy": ChunkPolicy(0)}, "chunks hold at least one new item"),
]


@pytest.mark.parametrize(("changed", "message"), CONNECTION_ERRORS, ids=[error[1] for error in CONNECTION_ERRORS])
def test_a_wrong_connection_is_refused(changed: dict[str, object], message: str) -> None:
    walks, topology = talking(**changed)  # type: ignore[arg-type]
    assert message in refused(walks, topology=topology)


def test_a_consumer_follows_one_producer() -> None:
    walks, topology = talking()
    walks["sing"] = node("singer", (), (edge("codec", "codes", target_partition="audio"),))
    second = Connection("song", "audio", "codec", "codes", fixed(2), "decode")
    partitions = (*topology.partitions, Partition("song", ("sing",)))
    message = refused(walks, topology=PartitionTopology(partitions, (*topology.connections, second)))
    assert "takes streams of ['song', 'text']" in message


def test_items_of_a_stream_are_made_on_one_worker() -> None:
    walks, topology = talking()
    walks["hum"] = node("hummer", (), (edge("codec", "codes", target_partition="audio"),))
    partitions = (Partition("text", ("speak", "hum")), topology.partitions[1])
    both = PartitionTopology(partitions, topology.connections)
    assert "made on several workers" in refused(walks, topology=both, placement={"hummer": 1})
    assert compile_one(walks, topology=both).streams[0].tags == {"speak": "decode", "hum": "decode"}


def test_streams_of_a_stream_fed_partition_keep_step() -> None:
    walks, topology = talking()
    outputs = (edge("codec", "codes", target_partition="audio"), edge("codec", "pitch", target_partition="audio"))
    walks["speak"] = Loop(node("talker", (), outputs), 5, name="speak")
    walks["decode"] = node("codec", ("codes", "pitch"), (emit("wave"),))
    pitch = dataclasses.replace(topology.connections[0], signal="pitch")
    compile_one(walks, topology=PartitionTopology(topology.partitions, (topology.connections[0], pitch)))
    slower = dataclasses.replace(pitch, policy=fixed(3))
    message = refused(walks, topology=PartitionTopology(topology.partitions, (topology.connections[0], slower)))
    assert "a pass takes one chunk of each, so they must keep step" in message


def test_every_walk_of_a_stream_fed_partition_is_tagged() -> None:
    walks, topology = talking()
    walks["extra"] = node("codec", ("codes",), ())
    partitions = (topology.partitions[0], Partition("audio", ("decode", "extra"), stream_fed=True))
    message = refused(walks, topology=PartitionTopology(partitions, topology.connections))
    assert "walks ['extra'] of the stream-fed partition 'audio' are named by no consumer_walk" in message


def test_a_live_value_needs_one_reader() -> None:
    """Only the node that made a value may read it from its device column."""

    def live(**walks: GraphSection) -> bool:
        graph = compile_one(dict(walks))
        program = next(program for (walk, _), program in graph.programs.items() if walk == "w")
        return next(one for one in program.nodes if one.key.node == "a").routes[0].live_ok

    self_loop = node("a", ("x",), (edge("a", "x"),), optional_inputs=frozenset({"x"}))
    assert live(w=Loop(self_loop, 3))
    assert live(w=node("a", (), (emit("x"),)))
    assert live(w=node("a", (), (keep("x"),)), v=node("a", ("x",), ()))
    assert live(w=Loop(self_loop, 3, (emit("x"),)))
    assert not live(w=seq(node("a", (), (edge("b", "x"),)), node("b", ("x",), ())))
    assert not live(w=node("a", (), (keep("x"),)), v=node("b", ("x",), ()))
    assert not live(w=Loop(self_loop, 3, (emit("x"),), accumulated_outputs=frozenset({"x"})))
    # A step speculated past a stop has overwritten the column when the next walk reads it.
    assert not live(w=Loop(self_loop, 3, (keep("x"),)), v=node("a", ("x",), ()))
