"""Requests that cannot be served fail alone, wherever that shows, and leave nothing behind."""

import pytest
import torch
from support.instance import Instance, Tuning

from mstar.communication.messages import Remove, StartWalk
from mstar.communication.tensor_store import TensorStore
from mstar.graph.protocol import NO_TENSOR, Cols
from mstar.model.base import WalkPlan
from mstar.worker.parking import Parking
from mstar.worker.requests import Request, RequestTable
from mstar.worker.rid_table import RidTable


@pytest.fixture(params=["at once", "after a wait"])
def tuning(request) -> Tuning:
    return Tuning(max_rows=1 if request.param == "after a wait" else 16)


def without_limits(instance: Instance) -> None:
    """From now on the model forgets the loop limits of its plan."""
    model = instance.model

    class Forgetful:
        def plan_walks(self, prompt, max_tokens):
            return WalkPlan(model.plan_walks(prompt, max_tokens).partitions, {})

    instance._books.model = Forgetful()


def test_what_a_resource_refuses_fails_alone(tiny, tuning):
    instance = tiny.instance(tuning)
    baseline = dict(instance.gauges(0))
    good = tiny.submit(instance, "good", tiny.prompt(5), max_tokens=8)
    bad = tiny.submit(instance, "bad", tiny.prompt(6), max_tokens=8, stop_token_ids=(10**6,))
    later = tiny.submit(instance, "later", tiny.prompt(7), max_tokens=8)
    instance.run()
    assert "token id 1000000 is outside the vocabulary" in (bad.failure or "")
    assert good.tokens == tiny.greedy(tiny.prompt(5), 8)
    assert later.tokens == tiny.greedy(tiny.prompt(7), 8)
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def test_nothing_of_a_refused_request_is_started(tiny):
    """Its next walk arrives before the front has read the refusal."""
    instance = tiny.instance(Tuning())
    baseline = dict(instance.gauges(0))
    bad = tiny.submit(instance, "bad", tiny.prompt(6), stop_token_ids=(10**6,))
    instance.parts[0].inbox.apply(instance.parts[0].bus.receive())
    instance.parts[0].inbox.apply([StartWalk(rid="bad", partition="text", walks=("prefill",), last=True)])
    instance.run()
    assert bad.failure is not None
    assert instance.steps == []
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def test_a_walk_that_cannot_begin_fails_its_request_alone(tiny, tuning):
    instance = tiny.instance(tuning)
    baseline = dict(instance.gauges(0))
    good = tiny.submit(instance, "good", tiny.prompt(5), max_tokens=8)
    without_limits(instance)
    bad = tiny.submit(instance, "bad", tiny.prompt(6), max_tokens=8)
    instance.run()
    assert bad.failure == "the server could not begin the request"
    assert good.tokens == tiny.greedy(tiny.prompt(5), 8)
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def test_more_requests_than_a_worker_may_know_are_refused_for_now(tiny):
    instance = tiny.instance(Tuning(max_rows=2, max_waiting=2))
    baseline = dict(instance.gauges(0))
    results = [tiny.submit(instance, f"r{index}", tiny.prompt(5, index), max_tokens=4) for index in range(6)]
    instance.run()
    assert [result.failure for result in results[:4]] == [None] * 4
    assert {result.failure for result in results[4:]} == {"this server holds 4 requests already; try again later"}
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def test_removal_twice_and_of_a_stranger(tiny):
    instance = tiny.instance(Tuning())
    baseline = dict(instance.gauges(0))
    tiny.submit(instance, "r", tiny.prompt(5), max_tokens=50)
    for _ in range(4):
        instance.tick()
    instance.abort("r")
    instance.parts[0].inbox.apply([Remove("r"), Remove("nobody"), Remove("r")])
    instance.run()
    assert dict(instance.gauges(0)) == baseline
    instance.close()


class RefusingGraph:
    """A runtime that has not met any request yet."""

    def ingest(self, block: Cols) -> list[int]:
        return list(range(len(block.slots)))


def test_an_absent_value_that_was_parked_is_no_tensor_to_free():
    rids, store = RidTable(4), TensorStore()
    parking = Parking(RefusingGraph(), rids, store)  # pyright: ignore[reportArgumentType]
    handle, one = rids.intern("r"), store.put(torch.zeros(1))
    parking.edges(Cols([handle, handle], [0, 1], [NO_TENSOR, one], [1, 1]))
    assert (len(parking), store.num_live) == (1, 1)
    rids.release(handle)
    assert (len(parking), store.num_live) == (0, 0)


def test_each_value_of_an_emitted_list_counts():
    rids = RidTable(4)
    table = RequestTable(4, rids)
    handle = rids.intern("r")
    table.put(Request("r", handle, open=None, prompt_ids=None))  # pyright: ignore[reportArgumentType]
    table.count_emits("codes", [handle, handle, handle])
    assert table.emits(handle) == {"codes": 3}
