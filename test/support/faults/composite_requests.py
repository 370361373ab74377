"""Requests to the composite model on three workers, one of which is to be hit by a fault."""

from collections.abc import Sequence

from support.composite.deployment import Composite, Request
from support.faults.declared import Fault
from support.faults.instance_faults import InstanceFaults
from support.instance import Tuning


def assert_only_hit_requests_fail(
    composite: Composite, tuning: Tuning, fault: Fault, place: str, requests: Sequence[Request], why: str
) -> None:
    """`requests` are `r0`, `r1`, ...; `fault` strikes one of them at the node or resource `place`. Those that it hits
    fail and say `why`, the others have their outputs, the next request is served, and nothing is held."""
    instance = composite.instance("three_workers", tuning)
    faults = InstanceFaults(instance)
    struck = faults.add(fault, place)
    for index, request in enumerate(requests):
        composite.submit(instance, f"r{index}", request)
        instance.tick()
    instance.run()
    assert fault.rid in struck.rids
    for index, request in enumerate(requests):
        rid = f"r{index}"
        if rid in struck.rids:
            assert why in (instance.results[rid].failure or "")
        else:
            composite.check(instance, rid, request)
    composite.submit(instance, "after", requests[-1])
    instance.run()
    composite.check(instance, "after", requests[-1])
    for _ in range(3):
        instance.tick()
    faults.assert_baseline()
    instance.close()
