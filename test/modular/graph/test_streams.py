"""Streaming partitions: passes, tags, ends, credit, and partitions that are split over workers."""

from __future__ import annotations

import pytest
from support.graph_bench import GraphBench, compile_one, edge, emit, keep, node

from mstar.graph.base import GraphSection, Loop, LoopLimit, Parallel, Sequential
from mstar.graph.compile import CompiledGraph
from mstar.graph.protocol import NO_TENSOR, Cols, GraphError, Routed
from mstar.streaming.chunk_policy import ChunkPolicy, fixed, sliding
from mstar.streaming.topology import Connection, Partition, PartitionTopology

PAIRS = fixed(2)


def graph(
    policy: ChunkPolicy = PAIRS,
    credit: int = 256,
    codec: GraphSection | None = None,
    placement: dict[str, int] | None = None,
) -> CompiledGraph:
    """A talker that streams one code per iteration, in two walks; its codec has a walk for each."""
    talk = node("talker", (), (edge("codec", "code", target_partition="audio"), emit("text")))
    walks: dict[str, GraphSection] = {
        "talk": Loop(talk, LoopLimit("n"), name="talk"),
        "sing": Loop(talk, LoopLimit("n"), name="sing"),
        "speech": codec or node("codec", ("code",), (emit("wave"),)),
        "song": node("codec", ("code",), (emit("wave"),)),
    }
    topology = PartitionTopology(
        (Partition("voice", ("talk", "sing")), Partition("audio", ("speech", "song"), stream_fed=True)),
        (Connection("voice", "audio", "codec", "code", policy, (("talk", "speech"), ("sing", "song")), credit=credit),),
    )
    return compile_one(walks, topology=topology, placement=placement)


def talk(bench: GraphBench, steps: int, walk: str = "talk") -> Routed:
    """Iterations of the talker; returns the last one's routing."""
    routed = Routed()
    for _ in range(steps):
        _, routed = bench.run("talker", walk, live=["text"])
    return routed


def hear(bench: GraphBench, walk: str = "speech") -> tuple[list[int], bool, int]:
    """One pass of the codec: its chunk, whether it is final, its number."""
    taken, routed = bench.run("codec", walk)
    bench.release_outgoing(routed)
    return taken.lists["code"][0], taken.finals[0], taken.iterations[0]


def test_passes_of_a_codec_on_the_same_worker() -> None:
    bench = GraphBench(graph())
    bench.add(1, walk="talk", partition="voice", n=5)
    bench.add(1, walk=None, partition="audio")
    talk(bench, 2)
    assert dict(bench.ready()) == {"talker": [1]}  # two items, but they may be the last ones
    talk(bench, 1)
    assert hear(bench) == ([1, 2], False, 0)
    assert list(bench.books.values) == [3]
    routed = talk(bench, 2)
    assert not routed.streams and routed.walk_done == [(1, "voice")]
    assert hear(bench) == ([3, 5], False, 1)
    assert bench.ready() == []
    bench.graph.end_streams(1, "voice", routed)
    taken, routed = bench.run("codec", "speech")
    assert taken.lists["code"] == [[6]] and taken.finals == [True] and taken.iterations == [2]
    assert routed.walk_done == [(1, "audio")]  # the pass that consumes the last chunk says so
    bench.release_outgoing(routed)
    assert bench.nothing_left()
    bench.remove(1)


def test_items_may_come_before_their_partition_is_started() -> None:
    bench = GraphBench(graph())
    bench.add(1, walk="talk", partition="voice", n=9)
    talk(bench, 3)
    assert dict(bench.ready()) == {"talker": [1]}
    bench.add(1, walk=None, partition="audio")
    assert hear(bench)[0] == [1, 2]


def test_a_stream_without_items_ends_its_consumer_without_a_pass() -> None:
    bench = GraphBench(graph())
    bench.add(1, walk="talk", partition="voice", n=0)
    bench.add(1, walk=None, partition="audio")
    routed = bench.collect()
    assert routed.walk_done == [(1, "voice")]
    bench.graph.end_streams(1, "voice", routed)
    assert routed.walk_done == [(1, "voice"), (1, "audio")]


def test_a_tag_change_cuts_the_chunk_and_switches_the_walk_when_idle() -> None:
    bench = GraphBench(graph(fixed(3)))
    bench.add(1, walk="talk", partition="voice", n=4)
    bench.add(1, walk=None, partition="audio")
    talk(bench, 4)
    bench.graph.set_walk(1, "voice", "sing")
    running = bench.take("codec", "speech")
    assert running.lists["code"] == [[1, 2, 3]]
    talk(bench, 4, "sing")
    assert bench.ready() == []  # busy with its pass
    bench.release_outgoing(bench.finish(running))
    chunk, final, number = hear(bench)
    assert (len(chunk), final, number) == (1, False, 1)  # what is left of the first walk's items
    assert len(hear(bench, "song")[0]) == 3
    bench.graph.end_streams(1, "voice", Routed())
    assert hear(bench, "song")[1:] == (True, 3)


def test_windows_overlap_and_items_stay_until_they_have_passed() -> None:
    bench = GraphBench(graph(sliding(3, 1)))
    bench.add(1, walk="talk", partition="voice", n=5)
    bench.add(1, walk=None, partition="audio")
    bench.graph.end_streams(1, "voice", talk(bench, 5))
    chunks = [hear(bench)[0] for _ in range(3)]
    assert chunks[0][1:] == chunks[1][:2] and chunks[1][1:] == chunks[2][:2]
    assert bench.nothing_left()


def test_credit_gates_the_producer_on_its_own_worker() -> None:
    bench = GraphBench(graph(PAIRS, credit=3))
    bench.add(1, walk="talk", partition="voice", n=9)
    bench.add(1, walk=None, partition="audio")
    talk(bench, 3)
    assert dict(bench.ready()) == {"codec": [1]}  # three items ahead: the talker waits
    hear(bench)
    assert dict(bench.ready()) == {"talker": [1]}
    talk(bench, 2)
    assert dict(bench.ready()) == {"codec": [1]}


def two_workers(credit: int = 4) -> tuple[GraphBench, GraphBench]:
    compiled = graph(PAIRS, credit, placement={"codec": 1})
    voice, audio = GraphBench(compiled, 0), GraphBench(compiled, 1)
    voice.add(1, walk="talk", partition="voice", n=6)
    return voice, audio


def test_streams_between_workers() -> None:
    voice, audio = two_workers()
    tag = voice.compiled.walk_names.index("speech")
    assert audio.graph.stream_put([1], [0], audio.put(), [tag]) == [0]  # unknown: the caller keeps it
    audio.add(1, walk=None, partition="audio")
    for step in range(4):
        routed = talk(voice, 1)
        assert routed.streams == {1: ([1], [0], [step + 1], [tag])}
        voice.release_outgoing(routed)
        assert audio.graph.stream_put([1], [0], audio.put(), [tag]) == []
    assert voice.ready() == []  # at its credit
    taken, routed = audio.run("codec", "speech")
    assert taken.lists["code"] == [[2, 3]]
    assert routed.credits == {0: ([1], [0], [2])}
    audio.release_outgoing(routed)
    voice.graph.stream_credit([1], [0], [1])
    assert voice.ready() == [("talker", [1])]
    voice.graph.stream_credit([1], [0], [1])
    routed = talk(voice, 2)
    voice.graph.end_streams(1, "voice", routed)
    assert routed.stream_ends == {1: ([1], [0], [6])}
    voice.release_outgoing(routed)
    voice.graph.end_streams(1, "voice", after := Routed())  # once is enough
    assert not after.stream_ends
    audio.graph.stream_end(1, 0, 6)  # before its last items
    assert audio.run("codec", "speech")[0].finals == [False]
    assert audio.graph.stream_put([1, 1], [0, 0], audio.put(2), [tag, tag]) == []
    taken, routed = audio.run("codec", "speech")
    assert taken.finals == [True] and routed.walk_done == [(1, "audio")]


def test_speculation_is_not_offered_to_a_producer_at_its_credit() -> None:
    voice, _ = two_workers(credit=4)
    talk(voice, 2)
    taken = voice.take("talker", "talk")
    assert voice.graph.speculate_node(taken.key, [1])
    voice.finish(taken, live=["text"])
    spec = voice.take("talker", "talk")
    spec_id, _ = voice.graph.spec_prepare(spec.key, [1])
    voice.finish(spec, live=["text"])  # the fourth item: full, with one step armed
    voice.graph.spec_settle(spec_id, [1])
    assert voice.graph.speculate_node(spec.key, [1]) == []
    voice.finish(spec, live=["text"])
    assert voice.ready() == []
    voice.graph.stream_credit([1], [0], [1])
    assert voice.ready() == []  # still four ahead
    voice.graph.stream_credit([1], [0], [1])
    assert voice.ready() == [("talker", [1])]


def test_an_ended_consumer_drops_and_credits_what_still_comes() -> None:
    bench = GraphBench(plan_driven(), 1)
    bench.add(1, walk="read", partition="use")
    items = bench.put(3)
    bench.graph.stream_put([1] * 3, [0] * 3, items, [1] * 3)
    routed = bench.run("reader", "read")[1]
    assert routed.walk_done == [(1, "use")] and routed.credits == {0: ([1], [0], [1])}
    routed = Routed()
    bench.graph.end_streams(1, "use", routed)
    assert routed.freed == items[1:] and routed.credits == {0: ([1], [0], [2])}
    bench.books.free(routed.freed)
    late = bench.put()
    assert bench.graph.stream_put([1], [0], late, [1]) == []
    routed = bench.collect()
    assert routed.freed == late and routed.credits == {0: ([1], [0], [1])}
    bench.graph.stream_end(1, 0, 4)
    assert bench.nothing_left()


def test_an_unused_consumer_is_dropped_at_the_source() -> None:
    """A request that wants no audio says so on the talker's worker; nothing is sent, and nothing gates the talker."""
    voice, _ = two_workers(credit=4)
    voice.graph.end_streams(1, "audio", Routed())
    routed = talk(voice, 6)
    assert not routed.streams and routed.walk_done == [(1, "voice")]
    voice.graph.end_streams(1, "voice", routed)
    assert not routed.stream_ends
    assert voice.nothing_left()


def plan_driven(loop: bool = False) -> CompiledGraph:
    """A reader that follows its own plan, and takes an item of the stream each time it runs."""
    reader: GraphSection = node("reader", ("s",), ())
    if loop:
        reader = Loop(reader, 4, name="read")
    walks: dict[str, GraphSection] = {
        "make": Loop(node("maker", (), (edge("reader", "s", target_partition="use"),)), 9, name="make"),
        "read": reader,
    }
    topology = PartitionTopology(
        (Partition("made", ("make",)), Partition("use", ("read",))),
        (Connection("made", "use", "reader", "s", fixed(1), "read"),),
    )
    return compile_one(walks, topology=topology, placement={"reader": 1})


def test_streaming_inputs_are_never_held_and_an_exhausted_stream_gives_empty_chunks() -> None:
    bench = GraphBench(plan_driven(loop=True), 1)
    bench.add(1, walk="read", partition="use")
    items = bench.put(2)
    bench.graph.stream_put([1, 1], [0, 0], items, [1, 1])
    bench.graph.stream_end(1, 0, 2)
    seen = []
    for _ in range(4):
        taken, routed = bench.run("reader", "read")
        seen.append((taken.lists["s"][0], taken.finals[0], taken.iterations[0]))
    assert seen == [([items[0]], False, 0), ([items[1]], True, 1), ([], True, 2), ([], True, 3)]
    assert routed.walk_done == [(1, "use")]
    assert bench.nothing_left()


def test_a_chunk_given_back_is_taken_again() -> None:
    bench = GraphBench(plan_driven(loop=True), 1)
    bench.add(1, walk="read", partition="use")
    items = bench.put(2)
    bench.graph.stream_put([1, 1], [0, 0], items, [1, 1])
    for _ in range(3):
        taken = bench.take("reader", "read")
        assert taken.lists["s"] == [[items[0]]]
        bench.graph.give_back(taken.key, [1])


def test_wrong_stream_calls() -> None:
    bench = GraphBench(plan_driven(), 1)
    with pytest.raises(GraphError, match="there is no stream 3"):
        bench.graph.stream_put([1], [3], [1], [0])
    with pytest.raises(GraphError, match="handle 1 is unknown"):
        bench.graph.stream_end(1, 0, 3)
    bench.add(1, walk="read", partition="use")
    bench.graph.stream_end(1, 0, 1)
    with pytest.raises(GraphError, match="stream 's' to 'reader': a stream of 0 items"):
        bench.graph.stream_end(1, 0, 2)
    with pytest.raises(GraphError, match="ended after 1"):
        bench.graph.stream_put([1, 1], [0, 0], bench.put(2), [1, 1])
    bench.graph.stream_credit([5], [0], [1])  # of a request that is gone: nothing to do
    fed = GraphBench(graph())
    fed.add(1, walk=None, partition="audio")
    with pytest.raises(GraphError, match="the tags of its items choose its walks"):
        fed.graph.set_walk(1, "audio", "song")


def test_a_pass_with_state_carries_it_to_the_next_pass() -> None:
    codec = node("codec", ("code", "state"), (keep("state"), emit("wave")), optional_inputs=frozenset({"state"}))
    bench = GraphBench(graph(fixed(1), codec=codec))
    bench.add(1, walk="talk", partition="voice", n=3)
    bench.add(1, walk=None, partition="audio")
    bench.graph.end_streams(1, "voice", talk(bench, 3))
    states = []
    for _ in range(3):
        taken = bench.take("codec", "speech")
        states.append(taken.ids["state"][0])
        state, wave = bench.put(2)
        bench.release_outgoing(bench.complete("codec", "speech", taken.rows, state=[state], wave=[wave]))
    assert states == [NO_TENSOR, 4, 6]
    bench.remove(1)
    assert bench.nothing_left()


def test_a_pass_uses_its_chunk_even_if_its_node_is_skipped() -> None:
    codec = Sequential((Loop(node("codec", ("code",), ()), LoopLimit("n"), name="decode"), node("after", (), ())))
    bench = GraphBench(graph(fixed(2), codec=codec))
    bench.add(1, walk="talk", partition="voice", n=3)
    bench.add(1, walk=None, partition="audio", n=0)
    bench.graph.end_streams(1, "voice", talk(bench, 3))
    for _ in range(2):
        _, routed = bench.run("after", "speech")
    assert routed.walk_done == [(1, "audio")]
    assert bench.nothing_left()


def test_workers_of_a_split_consumer_follow_the_one_where_the_stream_arrives() -> None:
    codec = Sequential((node("codec", ("code",), (edge("tail", "x"),)), node("tail", ("x",), (emit("wave"),))))
    compiled = graph(fixed(2), codec=codec, placement={"tail": 1})
    lead, tail = GraphBench(compiled, 0), GraphBench(compiled, 1)
    lead.add(1, walk="talk", partition="voice", n=4)
    lead.add(1, walk=None, partition="audio")
    tail.add(8, walk=None, partition="audio")
    markers = compiled.partition("audio").markers
    assert markers is not None
    slot = lead.slot("speech", "tail", "x")
    talk(lead, 2)
    assert talk(lead, 1).edges == {1: ([1], [markers.passes["speech"]], [], [0])}
    lead.graph.end_streams(1, "voice", talk(lead, 1))
    values = []
    for last in (False, True):
        taken, routed = lead.run("codec", "speech")
        assert routed.edges[1].slots[0] == slot
        assert routed.edges[1].slots[1:] == [markers.end if last else markers.passes["speech"]]
        assert routed.walk_done == ([(1, "audio")] if last else [])
        lead.release_outgoing(routed)
        values += tail.put()
    # The values of both passes and the end come before the tail has begun: each waits for its pass.
    assert tail.graph.ingest(Cols([8], [slot], [values[0]], [1])) == []
    assert tail.ready() == []
    passes = [markers.passes["speech"]] * 2
    assert tail.graph.ingest(Cols([8] * 4, [passes[0], passes[1], slot, markers.end], [values[1]], [0, 0, 1, 0])) == []
    for number in range(2):
        taken, routed = tail.run("tail", "speech")
        assert taken.ids["x"] == [values[number]] and taken.iterations == [number]
        tail.release_outgoing(routed)
    assert routed.walk_done == [(8, "audio")]
    tail.remove(8)
    assert tail.nothing_left()


def test_streams_of_two_signals_keep_step() -> None:
    outputs = (edge("codec", "code", target_partition="audio"), edge("codec", "pitch", target_partition="audio"))
    walks: dict[str, GraphSection] = {
        "talk": Loop(node("talker", (), outputs), 3, name="talk"),
        "speech": node("codec", ("code", "pitch"), (emit("wave"),)),
    }
    connections = tuple(
        Connection("voice", "audio", "codec", signal, fixed(2), "speech") for signal in ("code", "pitch")
    )
    topology = PartitionTopology(
        (Partition("voice", ("talk",)), Partition("audio", ("speech",), stream_fed=True)), connections
    )
    bench = GraphBench(compile_one(walks, topology=topology))
    bench.add(1, walk="talk", partition="voice")
    bench.add(1, walk=None, partition="audio")
    for _ in range(3):
        _, routed = bench.run("talker", "talk")
    taken, done = bench.run("codec", "speech")
    assert taken.lists == {"code": [[1, 3]], "pitch": [[2, 4]]}
    bench.release_outgoing(done)
    bench.graph.end_streams(1, "voice", routed)
    taken, done = bench.run("codec", "speech")
    assert taken.lists == {"code": [[5]], "pitch": [[6]]} and taken.finals == [True]
    bench.release_outgoing(done)
    assert bench.nothing_left()


def test_a_chain_of_stream_fed_partitions_ends_by_itself() -> None:
    walks: dict[str, GraphSection] = {
        "talk": Loop(node("talker", (), (edge("codec", "code", target_partition="audio"),)), 3, name="talk"),
        "speech": Parallel((node("codec", ("code",), (edge("mixer", "wave", target_partition="mix"),)), node("log"))),
        "mix": node("mixer", ("wave",), (emit("out"),)),
    }
    topology = PartitionTopology(
        (
            Partition("voice", ("talk",)),
            Partition("audio", ("speech",), stream_fed=True),
            Partition("mix", ("mix",), stream_fed=True),
        ),
        (
            Connection("voice", "audio", "codec", "code", fixed(1), "speech"),
            Connection("audio", "mix", "mixer", "wave", fixed(2), "mix"),
        ),
    )
    bench = GraphBench(compile_one(walks, topology=topology))
    bench.add(1, walk="talk", partition="voice")
    for partition in ("audio", "mix"):
        bench.add(1, walk=None, partition=partition)
    for _ in range(3):
        _, routed = bench.run("talker", "talk")
    bench.graph.end_streams(1, "voice", routed)
    ended = []
    while ready := bench.ready():
        name = ready[0][0]
        _, routed = bench.run(name, {"codec": "speech", "log": "speech", "mixer": "mix"}[name])
        ended += routed.walk_done
        bench.release_outgoing(routed)
    assert ended == [(1, "audio"), (1, "mix")]
    assert bench.nothing_left()
