"""Random graphs under random events mean what a direct reading of their declarations means.

Simulated workers run the compiled graph with everything random that may be random: placement over one to three
workers, arrival of messages, composition of steps, giving back, speculation with abandonment, gates, failures. Checked
on the way: every id is freed exactly once, no row is ready and running at once, nothing waits for ever. At the end the
values that reached the client, and their order, are those of the reference interpreter.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.graph_cluster import Cluster
from support.graph_programs import Program, grow_program
from support.graph_reference import Reference
from support.graph_worker import Chances

from mstar.graph.compile import compile_walks

seeds = st.integers(0, 2**32)
sizes = st.integers(1, 12)
many = settings(max_examples=3 * settings.default.max_examples)  # an example takes a few milliseconds


def run(program: Program, num_workers: int, seed: int, chances: Chances) -> tuple[Cluster, Counter[str]]:
    """Runs a few requests on simulated workers and compares each with the reference."""
    rng = random.Random(seed)
    compiled = compile_walks(program.walks, program.topology, program.place(num_workers, rng))
    cluster = Cluster(program, compiled, rng.randint(1, 4), rng, chances)
    cluster.run()
    for request, emits in enumerate(cluster.emits):
        if request not in cluster.failed:
            inputs = dict(one for partition in program.request_inputs for one in cluster.inputs(request, partition))
            reference = Reference(program.walks, program.topology, program.behaviour, program.limits, inputs)
            assert emits == reference.run(program.plans), f"request {request} of\n{compiled.describe()}"
    counts: Counter[str] = Counter()
    for worker in cluster.workers.values():
        counts.update(worker.counts)
    return cluster, counts


@many
@given(seeds, sizes, st.sampled_from([0, 4]))
@example(11, 12, 4)
@example(607, 8, 4)
def test_one_worker(seed: int, size: int, stop_odds: int) -> None:
    run(grow_program(seed, size, stop_odds=stop_odds), 1, seed, Chances())


@many
@given(seeds, sizes, st.sampled_from([0, 4]), st.integers(2, 3))
def test_several_workers(seed: int, size: int, stop_odds: int, num_workers: int) -> None:
    run(grow_program(seed, size, stop_odds=stop_odds), num_workers, seed, Chances())


@many
@given(seeds, sizes, st.sampled_from([0, 4]), st.integers(1, 3))
@example(2507, 12, 4, 1)
@example(3058, 11, 4, 3)
def test_streams(seed: int, size: int, stop_odds: int, num_workers: int) -> None:
    run(grow_program(seed, size, streams=True, stop_odds=stop_odds), num_workers, seed, Chances())


@many
@given(seeds, sizes, st.integers(1, 3))
def test_failures_leave_the_others_alone(seed: int, size: int, num_workers: int) -> None:
    run(grow_program(seed, size, streams=True, stop_odds=4), num_workers, seed, Chances(fail=0.05))


@many
@given(seeds, sizes, st.integers(1, 3))
def test_speculation_changes_nothing(seed: int, size: int, num_workers: int) -> None:
    """The same requests with every step speculated on, with most of that abandoned, and without."""
    program = grow_program(seed, size, stop_odds=6)
    outcomes = []
    for chances in (Chances(1.0, 0.0, 0.0), Chances(1.0, 0.7), Chances(0.0, 0.0)):
        cluster, _ = run(program, num_workers, seed, chances)
        outcomes.append(dict(enumerate(cluster.emits[:1])))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_the_random_events_reach_everything() -> None:
    """Over a fixed set of seeds each kind of event occurs often, so that the tests above mean something."""
    counts: Counter[str] = Counter()
    for seed in range(60):
        _, some = run(grow_program(seed, 10, streams=seed % 2 == 0, stop_odds=4), 1 + seed % 3, seed, Chances())
        counts.update(some)
    for kind in ("armed", "kept", "wasted", "abandoned", "given back", "parked"):
        assert counts[kind] >= 10, counts


@pytest.mark.parametrize("drop", ["edges", "items"])
def test_a_lost_message_is_noticed(drop: str) -> None:
    """The comparison sees what it should: a dropped value changes or stops a request."""
    noticed = 0
    for seed in range(20):
        program = grow_program(seed, 8, streams=True)
        rng = random.Random(seed)
        compiled = compile_walks(program.walks, program.topology, program.place(3, rng))
        cluster = Cluster(program, compiled, 1, rng, Chances())
        for worker in cluster.workers.values():
            worker.receive = _losing(worker.receive, drop)  # type: ignore[method-assign]
        try:
            cluster.run(3000)
            inputs = dict(one for partition in program.request_inputs for one in cluster.inputs(0, partition))
            reference = Reference(program.walks, program.topology, program.behaviour, program.limits, inputs)
            noticed += cluster.emits[0] != reference.run(program.plans)
        except AssertionError:
            noticed += 1
    assert noticed >= 5


def _losing(receive, column: str):
    """A `receive` that loses the first value of that kind."""
    lost = []

    def receive_less(frame) -> None:
        values = getattr(frame, column)
        if values and not lost:
            lost.append(values.pop(0))
        receive(frame)

    return receive_less
