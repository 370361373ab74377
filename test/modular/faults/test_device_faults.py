"""An error of the device itself belongs to no row: the worker ends with it, its requests fail, and the next incarnation
serves as if nothing had been; other workers give back what they held for those requests."""

import pytest
import torch
from support.composite.declarations import CODEC, ENCODER, LLM
from support.composite.deployment import PLACEMENTS, Composite, make_requests
from support.faults.declared import Fault, lose_the_device
from support.faults.instance_faults import InstanceFaults, held_by, settle
from support.faults.lost_device import lose_device_at
from support.faults.texts import NUM_TOKENS, RIDS, Texts
from support.instance import Instance, Tuning
from support.tiny_serving import TinyLlama

from mstar.model.llama.model import NODE

REQUESTS = make_requests(4, seed=41)


def run_until_lost(instance: Instance, rank: int) -> None:
    """The error leaves the worker's loop, and its process with it."""
    with pytest.raises(torch.AcceleratorError):
        for _ in range(5000):
            instance.tick()
    instance.lose(rank)
    settle(instance)


@pytest.mark.parametrize("step", [0, 1, 5])
def test_it_shows_at_the_end_of_a_step(tiny: TinyLlama, tuning: Tuning, step: int):
    """As on an accelerator: steps are launched behind it, and the wait for the first of them raises."""
    instance = tiny.instance(tuning)
    texts, before = Texts(tiny, instance), held_by(instance, 0)
    lose_device_at(instance.parts[0], step)
    texts.submit(*RIDS)
    run_until_lost(instance, 0)
    texts.assert_only_failed(set(RIDS), "a worker was lost")
    instance.restart(0)
    assert held_by(instance, 0) == before
    after = tiny.submit(instance, "after", tiny.prompt(9), max_tokens=NUM_TOKENS)
    instance.run()
    assert after.tokens == tiny.greedy(tiny.prompt(9), NUM_TOKENS)
    instance.close()


def test_it_shows_in_a_launch(tiny: TinyLlama, tuning: Tuning):
    """An exception in a forward fails rows; this one does not, because no later step could run."""
    instance = tiny.instance(tuning)
    faults, texts = InstanceFaults(instance), Texts(tiny, instance)
    fault = faults.add(Fault("forward_batched", walk="decode", after=2, effect=lose_the_device), NODE)
    texts.submit(*RIDS)
    run_until_lost(instance, 0)
    assert len(fault.struck) == 1
    texts.assert_only_failed(set(RIDS), "a worker was lost")
    faults.clear()
    instance.restart(0)
    texts.assert_well_again(InstanceFaults(instance))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("node", [ENCODER, LLM, CODEC])
def test_one_of_three_workers(composite: Composite, node: str, overlap: bool):
    instance = composite.instance("three_workers", Tuning(overlap=overlap))
    instance.run()
    before = [held_by(instance, rank) for rank in range(3)]
    victim = PLACEMENTS["three_workers"][node]
    lose_device_at(instance.parts[victim], 2)
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"r{index}", request)
    run_until_lost(instance, victim)
    for rank in {0, 1, 2} - {victim}:
        assert held_by(instance, rank) == before[rank], f"worker {rank}"
    instance.restart(victim)
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"again{index}", request)
    instance.run()
    for index, request in enumerate(REQUESTS):
        composite.check(instance, f"again{index}", request)
    settle(instance)
    assert [held_by(instance, rank) for rank in range(3)] == before
    instance.close()
