"""Prompts of the composite model cut into small chunks, features and all, in every placement."""

import pytest
from support.composite.declarations import LLM
from support.composite.deployment import PLACEMENTS, Composite, make_requests
from support.instance import Tuning

from mstar.engine.execution import Step

REQUESTS = make_requests(8)
DEVICES = {"plain": Tuning(overlap=False), "threaded": Tuning(threaded=True), "late": Tuning(late=True)}


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


CASES = [
    *((placement, "threaded", 16) for placement in PLACEMENTS),
    *((placement, device, 5) for placement in ("one_worker", "three_workers") for device in DEVICES),
]


@pytest.mark.parametrize(("placement", "device", "budget"), CASES)
def test_outputs_equal_the_reference(composite: Composite, placement: str, device: str, budget: int):
    tuning = DEVICES[device]
    instance = composite.instance(
        placement, Tuning(tuning.overlap, tuning.threaded, tuning.late, max_step_tokens=budget)
    )
    engine = instance.parts[PLACEMENTS[placement][LLM]].engine
    submit, cut, carried = engine.submit, [], []

    def note(step: Step, **how: bool) -> None:
        if step.node == LLM:
            assert step.spans.sum() <= budget + sum(
                p.end - p.begin for p in step.parts if p.taken.key.walk != "prefill"
            )
            cut.append(step.unfinished is not None)
            carried.append(bool(step.carried))
        submit(step, **how)

    engine.submit = note
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"r{index}", request)
    instance.run()
    for index, request in enumerate(REQUESTS):
        composite.check(instance, f"r{index}", request)
    assert sum(cut) >= 3, "no prompt was cut"
    assert any(carried) == tuning.overlap
    for rank in range(len(instance.workers)):
        gauges = instance.gauges(rank)
        assert (gauges["mstar_handles"], gauges["mstar_tensors"]) == (0, 0)
    instance.close()
