"""A worker is lost in the middle of requests that span three: what the others held for them goes, and when it is back
everything works as before. One thread, so that the moment can be anything; real processes are in `test_recovery.py`."""

import random

import pytest
from support.composite.deployment import Composite, make_requests
from support.instance import Instance, Tuning, shared_memory_of

REQUESTS = make_requests(8, seed=4)
TUNINGS = [Tuning(max_rows=4), Tuning(threaded=True, capture_sizes=(1, 2, 4)), Tuning(late=True, max_rows=4)]
RANKS = (0, 1, 2)


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


def assert_nothing_is_left(instance: Instance) -> None:
    """On the workers that live: of rows, pages, tensors, parked values, tickets and debts."""
    for rank in set(RANKS) - instance.lost:
        gauges, inbox = instance.gauges(rank), instance.parts[rank].inbox
        for name in ("mstar_handles", "mstar_running_rows", "mstar_queue_depth", "mstar_tensors"):
            assert gauges[name] == 0, f"worker {rank}: {name} is {gauges[name]}"
        assert gauges.get('mstar_pages{pool="kv",state="owned"}', 0) == 0
        assert (inbox.leaving, len(inbox._parking)) == ([], 0)
        transport = inbox._transport
        assert transport._arena is not None
        assert (transport._arena.num_tickets, transport._arena.num_used_bytes) == (0, 0), f"worker {rank}"
        assert (transport.num_waiting, transport._debts.peers(), transport.take_failures()) == (0, [], [])


def settle(instance: Instance) -> None:
    """Until nobody has anything to do."""
    quiet = 0
    while quiet < 3:
        quiet = 0 if instance.tick() else quiet + 1


def run_all(composite: Composite, instance: Instance, tag: str) -> None:
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"{tag}{index}", request)
    instance.run()
    for index, request in enumerate(REQUESTS):
        composite.check(instance, f"{tag}{index}", request)


def finish(composite: Composite, instance: Instance) -> None:
    """The same requests once more, with everybody there; then the end of the instance."""
    run_all(composite, instance, "again")
    settle(instance)
    assert_nothing_is_left(instance)
    assert shared_memory_of(instance.name) != []
    instance.close()
    assert shared_memory_of(instance.name) == []


@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("seed", range(6))
def test_at_any_moment(composite: Composite, victim: int, seed: int):
    rng = random.Random(100 * victim + seed)
    instance = composite.instance("three_workers", TUNINGS[seed % 3])
    waiting = list(range(len(REQUESTS)))
    for _ in range(rng.randint(1, 60)):
        if waiting and rng.random() < 0.6:
            index = waiting.pop(0)
            composite.submit(instance, f"r{index}", REQUESTS[index])
        instance.tick([rank for rank in RANKS if rng.random() < 0.7])
    done = {rid for rid, result in instance.results.items() if result.done}
    instance.lose(victim)
    settle(instance)
    assert_nothing_is_left(instance)
    for rid, result in instance.results.items():
        assert (result.failure is None) == (rid in done)
    for rid in done:
        composite.check(instance, rid, REQUESTS[int(rid.removeprefix("r"))])
    instance.restart(victim)
    finish(composite, instance)


@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("num_opened", [0, 1, 2])
def test_while_requests_are_being_opened(composite: Composite, victim: int, num_opened: int):
    """`num_opened` workers have promised room; the next one has been asked."""
    instance = composite.instance("three_workers", Tuning())
    instance.tick()
    instance.net.hold("front", f"w{num_opened}")
    for index, request in enumerate(REQUESTS[:3]):
        composite.submit(instance, f"r{index}", request)
    settle(instance)
    assert {result.num_opened for result in instance.results.values()} == {num_opened}
    assert instance.num_handles == 3 * num_opened
    instance.lose(victim)
    instance.net.unhold()
    settle(instance)
    assert_nothing_is_left(instance)
    assert all(result.failure for result in instance.results.values())
    instance.restart(victim)
    finish(composite, instance)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_values_that_came_before_their_walk(composite: Composite, victim: int, started: bool):
    """The encoder's features wait on the language model's worker, whose walk starts before the requests fail, or never
    does."""
    instance = composite.instance("three_workers", Tuning())
    for index, request in enumerate(REQUESTS[:3]):
        composite.submit(instance, f"r{index}", request)
    while any(result.num_opened < 3 for result in instance.results.values()):
        instance.net.hold("front", "w1")
        instance.tick()
        if any(result.num_opened == 1 for result in instance.results.values()):
            instance.net.unhold()  # to be opened, but not started, on worker 1
    settle(instance)
    assert len(instance.parts[1].inbox._parking) == 3
    assert instance.gauges(1)["mstar_tensors"] > 0
    if not started:
        assert instance.net.drop("front", "w1") > 0
    instance.lose(victim)
    instance.net.unhold()
    settle(instance)
    assert_nothing_is_left(instance)
    instance.restart(victim)
    finish(composite, instance)


def test_two_after_each_other_and_two_at_once(composite: Composite):
    instance = composite.instance("three_workers", Tuning())
    for round_, victims in enumerate([(1,), (2,), (0, 1), (1, 2)]):
        for index, request in enumerate(REQUESTS[:4]):
            composite.submit(instance, f"r{round_}.{index}", request)
        for _ in range(14):
            instance.tick()
        for victim in victims:
            instance.lose(victim)
        settle(instance)
        assert_nothing_is_left(instance)
        for victim in victims:
            instance.restart(victim)
    finish(composite, instance)


def test_what_a_lost_worker_said_last_arrives_after_the_news(composite: Composite):
    """Its frames lie in the sockets of the others; its shared memory is gone by then."""
    instance = composite.instance("three_workers", Tuning())
    for index, request in enumerate(REQUESTS[:4]):
        composite.submit(instance, f"r{index}", request)
    while not instance.results["r0"].tokens:
        instance.tick()
    for receiver in (0, 2):
        instance.net.hold("w1", f"w{receiver}")
    for _ in range(10):
        instance.tick()
    late = sum(count for (sender, _), count in instance.net.pending().items() if sender == "w1")
    assert late > 0, "nothing is under way"
    instance.lose(1)
    settle(instance)
    assert_nothing_is_left(instance)
    instance.net.unhold()
    settle(instance)
    assert_nothing_is_left(instance)
    instance.restart(1)
    finish(composite, instance)
