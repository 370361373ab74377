"""An exception in a resource's part of a step: its rows fail, by the name of stage and resource; what others had done
in the same transaction is undone, and nobody else notices."""

from dataclasses import replace

import pytest
from support.composite.deployment import Composite, make_requests
from support.faults.composite_requests import assert_only_hit_requests_fail
from support.faults.declared import STAGES, Fault
from support.faults.instance_faults import InstanceFaults
from support.faults.texts import RIDS, Texts
from support.instance import Tuning
from support.tiny_serving import TinyLlama

KEYS = ("kv", "sampler")
REQUESTS = make_requests(4, seed=31)


@pytest.mark.parametrize("after", [0, 3], ids=["at once", "in the middle"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_rows_of_the_step_fail(tiny: TinyLlama, tuning: Tuning, stage: str, key: str, after: int):
    """Two steps of two rows take turns, so that the others are in the middle of their texts."""
    node = tiny.build_node()
    node.max_rows = 2
    instance = tiny.instance(tuning, node)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    fault = faults.add(Fault(stage, rid="r2", after=after), key)
    texts.submit(*RIDS)
    instance.run()
    assert len(fault.struck) == 1
    assert len(fault.rids) <= 2, "the others live on"
    texts.assert_only_failed(fault.rids, f"{stage} of resource {key!r} raised Injected: broken on purpose")
    texts.assert_well_again(faults)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_always_raises_fails_everybody_and_ends(tiny: TinyLlama, tuning: Tuning, stage: str):
    instance = tiny.instance(tuning)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    faults.add(Fault(stage, times=None), "kv")
    texts.submit(*RIDS)
    instance.run()
    texts.assert_only_failed(set(RIDS), f"{stage} of resource 'kv'")
    faults.clear()
    texts.assert_well_again(faults)


@pytest.mark.parametrize("stage", STAGES)
def test_the_room_of_those_that_failed_goes_to_those_who_wait(tiny: TinyLlama, tuning: Tuning, stage: str):
    """Two pages hold two requests; the others get in when one has left."""
    instance = tiny.instance(replace(tuning, num_pages={"kv": 2}))
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    fault = faults.add(Fault(stage, rid="r0", after=2), "kv")
    texts.submit(*RIDS)
    instance.run()
    assert {"r0"} <= fault.rids <= {"r0", "r1"}
    texts.assert_only_failed(fault.rids, f"{stage} of resource 'kv'")
    texts.assert_well_again(faults)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resource_of_one_node_of_three_workers(composite: Composite, stage: str, overlap: bool):
    fault, why = Fault(stage, rid="r1", after=1), f"{stage} of resource 'sampler'"
    assert_only_hit_requests_fail(composite, Tuning(overlap=overlap), fault, "sampler", REQUESTS, why)
