"""Memory that runs out in a forward: once more in two halves, and what does not fit then fails alone."""

import pytest
from support.composite.declarations import CODES, ENCODER, LLM
from support.composite.deployment import Composite, make_requests
from support.faults.declared import Fault, run_out_of_memory
from support.faults.instance_faults import InstanceFaults
from support.faults.texts import RIDS, Texts
from support.instance import Tuning
from support.tiny_serving import TinyLlama

from mstar.model.llama.model import NODE

REQUESTS = make_requests(5, seed=21)


def does_nothing() -> None:
    """The effect of a fault that only counts the calls."""


@pytest.mark.parametrize("walk", ["prefill", "decode"])
@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
def test_a_step_that_fits_in_halves_fails_nobody(tiny: TinyLlama, tuning: Tuning, times: int | None, walk: str):
    instance = tiny.instance(tuning)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    forwards = faults.add(Fault("forward_batched", times=None, effect=does_nothing), NODE)
    refused = faults.add(Fault("forward_batched", walk=walk, times=times, min_rows=4, effect=run_out_of_memory), NODE)
    texts.submit(*RIDS)
    instance.run()
    assert len(refused.struck) == (1 if times or walk == "prefill" else 7)
    assert sum(call.num_rows == 2 for call in forwards.struck) == 2 * len(refused.struck)
    texts.assert_only_failed(set(), "")
    texts.assert_well_again(faults)


@pytest.mark.parametrize("walk", ["prefill", "decode"])
def test_a_half_that_does_not_fit_either_fails_alone(tiny: TinyLlama, tuning: Tuning, walk: str):
    instance = tiny.instance(tuning)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    # The whole step, then the first of its halves.
    fault = faults.add(Fault("forward_batched", walk=walk, times=2, min_rows=2, effect=run_out_of_memory), NODE)
    texts.submit(*RIDS)
    instance.run()
    assert [call.num_rows for call in fault.struck] == [4, 2]
    first_half = set(fault.struck[0].rids[:2])
    texts.assert_only_failed(first_half, f"the forward of {NODE} ran out of memory")
    texts.assert_well_again(faults)


def test_memory_that_is_always_out_fails_everybody_and_ends(tiny: TinyLlama, tuning: Tuning):
    instance = tiny.instance(tuning)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    faults.add(Fault("forward_batched", times=None, effect=run_out_of_memory), NODE)
    texts.submit(*RIDS)
    instance.run()
    texts.assert_only_failed(set(RIDS), "out of memory")
    faults.clear()
    texts.assert_well_again(faults)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("node", [ENCODER, LLM, CODES])
def test_a_node_of_a_composite_at_half_size(composite: Composite, node: str, overlap: bool):
    """Outputs of the halves go on over edges and streams to other workers as those of whole steps do."""
    instance = composite.instance("three_workers", Tuning(overlap=overlap))
    faults = InstanceFaults(instance)
    fault = faults.add(Fault("forward_batched", times=None, min_rows=4, effect=run_out_of_memory), node)
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"r{index}", request)
    instance.run()
    if node != ENCODER:  # media of different shapes run one by one
        assert fault.struck
    for index, request in enumerate(REQUESTS):
        composite.check(instance, f"r{index}", request)
    for _ in range(3):
        instance.tick()
    faults.assert_baseline()
    instance.close()
