"""A partition that ends early: a stop string found by the front, and a node that has produced all it was asked for."""

from dataclasses import replace

import pytest
from support.composite import deployment
from support.composite.declarations import LLM, MAIN
from support.composite.deployment import Composite, make_requests
from support.instance import Instance, Tuning

from mstar.communication.address import peer_name
from mstar.communication.messages import Stop

PLACEMENTS = ["one_worker", "language_apart", "three_workers"]


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


def idle(instance: Instance) -> bool:
    names = ("mstar_handles", "mstar_running_rows", "mstar_queue_depth", "mstar_tensors")
    gauges = [instance.gauges(rank) for rank in range(len(instance.workers))]
    return all(g[name] == 0 and g.get('mstar_pages{pool="kv",state="owned"}', 0) == 0 for g in gauges for name in names)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("after", [1, 4])
def test_a_stop_of_the_front_ends_the_text_and_the_rest_still_runs(composite, placement, overlap, after):
    """On every placement: fewer tokens, then the image and the audio that the reference makes of so many."""
    [request] = make_requests(1, seed=3, max_tokens=60)
    instance = composite.instance(placement, Tuning(overlap=overlap))
    composite.submit(instance, "r", request)
    result = instance.results["r"]
    while len(result.tokens) < after:
        instance.tick()
    for rank in instance.compiled.ranks_of_partition(MAIN):
        instance.front.send(peer_name(rank), [Stop("r", MAIN)])
    instance.run()
    assert after <= len(result.tokens) < 12
    assert result.reasons[MAIN] == "stop"
    composite.check(instance, "r", replace(request, max_tokens=len(result.tokens)))
    assert idle(instance)
    instance.close()


def finishing(composite: Composite, placement: str) -> Instance:
    """The node says at its stop token that nothing more is wanted."""

    def build(name: str):
        node = composite.build_node(name)
        if name == LLM:
            stops = node.check_stop
            node.check_stop = lambda *asked: [replace(decision, finish=True) for decision in stops(*asked)]
        return node

    return Instance(composite.model, build, deployment.PLACEMENTS[placement], Tuning())


def test_a_node_that_finishes_skips_what_was_planned(composite):
    request = next(one for one in make_requests(10) if one.stop_tokens)
    instance = finishing(composite, "one_worker")
    composite.submit(instance, "r", request)
    instance.run()
    result = instance.results["r"]
    assert result.tokens == composite.expected(request).tokens
    assert "latent" not in result.tensors
    assert idle(instance)
    instance.close()


def test_a_node_may_not_finish_before_walks_of_other_workers(composite):
    """They may have entered the walk and would wait for ever; the request fails instead, and the next one is served."""
    requests = make_requests(10)
    request = next(one for one in requests if one.stop_tokens)
    instance = finishing(composite, "three_workers")
    composite.submit(instance, "r", request)
    instance.run()
    assert "before ['paint'], which have nodes on other workers" in (instance.results["r"].failure or "")
    other = next(one for one in requests if not one.stop_tokens)
    composite.submit(instance, "other", other)
    instance.run()
    composite.check(instance, "other", other)
    assert idle(instance)
    instance.close()
