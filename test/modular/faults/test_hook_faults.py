"""An exception in a hook of a node: a row hook fails its row, a batch hook those of its step; nobody else notices."""

import pytest
from support.composite.declarations import CODEC, CODES, ENCODER, FLOW, LLM
from support.composite.deployment import Composite, make_requests
from support.faults.composite_requests import assert_only_hit_requests_fail
from support.faults.declared import HOOKS, Fault
from support.faults.instance_faults import InstanceFaults
from support.faults.texts import RIDS, Texts
from support.instance import Tuning
from support.tiny_serving import TinyLlama

from mstar.model.llama.model import NODE

REQUESTS = make_requests(4, seed=11)
OVERLAPS = {"on": Tuning(), "off": Tuning(overlap=False)}


@pytest.mark.parametrize("walk", ["prefill", "decode"])
@pytest.mark.parametrize("place", [place for place in HOOKS if place != "prepare_inputs"])
def test_a_batch_hook_fails_the_rows_of_its_step(tiny: TinyLlama, tuning: Tuning, place: str, walk: str):
    """Two steps of two rows take turns, so that the others are in the middle of their texts."""
    node = tiny.build_node()
    node.max_rows = 2
    instance = tiny.instance(tuning, node)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    fault = faults.add(Fault(place, rid="r2", walk=walk, after=3 if walk == "decode" else 0), NODE)
    texts.submit(*RIDS)
    instance.run()
    assert len(fault.struck) == 1
    assert len(fault.rids) <= 2, "the others live on"
    hook = f"the forward of {NODE} failed" if place == "forward_batched" else f"{place} of walk"
    texts.assert_only_failed(fault.rids, hook)
    assert all("Injected: broken on purpose" in (instance.results[rid].failure or "") for rid in fault.rids)
    texts.assert_well_again(faults)


@pytest.mark.parametrize("walk", ["prefill", "decode"])
@pytest.mark.parametrize("others", ["arrived with it", "arrive later"])
def test_a_row_hook_fails_its_row(tiny: TinyLlama, tuning: Tuning, others: str, walk: str):
    instance = tiny.instance(tuning)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    faults.ask_row_by_row(NODE)
    fault = faults.add(Fault("prepare_inputs", rid="r2", walk=walk, after=2 if walk == "decode" else 0), NODE)
    for rid in RIDS:
        texts.submit(rid)
        if others == "arrive later":
            instance.tick()
    instance.run()
    assert fault.rids == {"r2"}
    texts.assert_only_failed({"r2"}, "prepare_inputs of walk")
    texts.assert_well_again(faults)


def test_a_hook_that_always_raises_fails_everybody_and_ends(tiny: TinyLlama, tuning: Tuning):
    instance = tiny.instance(tuning)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    faults.add(Fault("declare_step", times=None), NODE)
    texts.submit(*RIDS)
    instance.run()
    texts.assert_only_failed(set(RIDS), "declare_step of walk")
    faults.clear()
    texts.assert_well_again(faults)


def test_a_request_fails_and_is_aborted_in_the_same_moment(tiny: TinyLlama, tuning: Tuning):
    instance = tiny.instance(tuning)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    fault = faults.add(Fault("forward_batched", rid="r2", walk="decode", after=2), NODE)
    texts.submit(*RIDS[:3])
    while not fault.struck:
        instance.tick()
    texts.submit("r3")
    instance.abort("r2")
    instance.tick()
    instance.abort("r3")
    instance.run()
    assert fault.rids == {"r0", "r1", "r2"}
    assert instance.results["r0"].failure is not None
    texts.assert_well_again(faults)


@pytest.mark.parametrize("overlap", list(OVERLAPS))
@pytest.mark.parametrize("node", [ENCODER, LLM, CODES, FLOW, CODEC])
def test_a_node_of_a_composite_on_one_of_three_workers(composite: Composite, node: str, overlap: str):
    """The request leaves all three workers, whatever it has under way between them."""
    fault, why = Fault("forward_batched", rid="r2"), f"the forward of {node} failed"
    assert_only_hit_requests_fail(composite, OVERLAPS[overlap], fault, node, REQUESTS, why)
