"""A request whose plan is known up front is open where its planned walks run, and nowhere else: what workers are told,
and what they send each other.
"""

from collections.abc import Iterator

import pytest
from support.conducted_instance import ConductedInstance
from support.conductor_rig import ConductorRig
from support.instance import Tuning, shared_memory_of
from support.planned_model import PLACEMENT, PlannedModel, prompt
from support.stepwise_nodes import Thinker

from mstar.communication.address import peer_name
from mstar.communication.messages import Open, Opened, PeerLost, Remove, StartWalk, Stop
from mstar.conductor.events import Failure, FinishedEvent
from mstar.engine.submodule import EngineInputs, NodeOutputs, NodeSubmodule
from mstar.model.base import ModelSetup

SETUP = ModelSetup({}, None, 64)
TUNINGS = {"plain": Tuning(overlap=False), "overlap": Tuning(), "late": Tuning(late=True)}


class Speaker(NodeSubmodule):
    """Says the thought."""

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {"word": inputs.tensors["thought"]}


def build_node(name: str) -> NodeSubmodule:
    return {"THINKER": Thinker, "SPEAKER": Speaker}[name]()


def new_rig() -> ConductorRig:
    rig = ConductorRig(PlannedModel(SETUP), PLACEMENT)
    rig.bring_up()
    return rig


def test_a_request_is_open_where_its_planned_walks_run():
    rig = new_rig()
    stream = rig.submit(prompt=prompt(1, "think"))
    [start] = rig.sent(0)
    assert isinstance(start, StartWalk) and start.walks == ("think",)
    assert start.open is not None and start.open.ranks == (0,)
    rig.conductor.stop(stream, 0)
    assert rig.sent(0) == [Stop("r0", "main")]
    rig.done("r0", "main", {}, rank=0)
    assert [type(event) for event in rig.events(stream)] == [FinishedEvent]
    assert rig.sent(0) == [Remove("r0")]
    assert rig.sent(1) == [], "the other worker never hears of it"


def test_a_plan_on_two_workers_is_opened_on_both():
    rig = new_rig()
    rig.submit(prompt=prompt(1, "think", "speak"))
    [opening] = rig.sent(0)
    assert isinstance(opening, Open) and opening.open.ranks == (0, 1)
    rig.say(Opened(rid="r0", rank=0))
    assert rig.sent(1) == [opening]
    rig.say(Opened(rid="r0", rank=1))
    starts = [message for rank in (0, 1) for message in rig.sent(rank)]
    assert [(type(start), start.walks) for start in starts] == [(StartWalk, ("think", "speak"))] * 2


@pytest.mark.parametrize("ends", ["lost", "silent"])
def test_a_worker_that_ends_fails_the_requests_that_are_open_there(ends: str):
    rig = new_rig()
    here, both = rig.submit(prompt=prompt(1, "think")), rig.submit(prompt=prompt(2, "think", "speak"))
    if ends == "lost":
        rig.say(PeerLost(1, 0, "killed by signal 9"))
    else:
        rig.time.pass_time(6)
        rig.beat(0)
        rig.time.pass_time(6)
    assert rig.events(here) == []
    [failure] = rig.events(both)
    assert isinstance(failure, Failure) and failure.code == "worker_lost"
    rig.done("r0", "main", {}, rank=0)
    assert [type(event) for event in rig.events(here)] == [FinishedEvent]


@pytest.fixture(params=list(TUNINGS))
def instance(request: pytest.FixtureRequest) -> Iterator[ConductedInstance]:
    made = ConductedInstance(PlannedModel(SETUP), build_node, PLACEMENT, TUNINGS[request.param])
    baseline = [dict(made.instance.gauges(rank)) for rank in (0, 1)]
    yield made
    assert [made.instance.gauges(rank) for rank in (0, 1)] == baseline
    made.close()
    assert shared_memory_of(made.instance.name) == []


def test_nothing_is_sent_to_a_worker_on_which_a_request_is_not_open(instance: ConductedInstance):
    """`think` keeps a thought that `speak` takes on the other worker, which is lost: were it sent, it would have no way
    to go, and the request would fail."""
    instance.instance.front.send(peer_name(0), [PeerLost(1, 1, "killed")])
    heard = instance.submit("r", prompt(7, "think", "think"))
    instance.run()
    assert (heard.finish, heard.failure) == ("length", None)
    failing = instance.submit("other", prompt(7, "think", "speak"))
    instance.run()
    assert failing.failure is not None and "cannot be reached" in failing.failure.message


def test_a_planned_walk_elsewhere_takes_what_was_kept_for_it(instance: ConductedInstance):
    """One beside the other: what is left out is left out for the request alone."""
    alone = instance.submit("alone", prompt(5, "think"))
    both = instance.submit("both", prompt(7, "think", "think", "speak"))
    instance.run()
    assert (alone.finish, alone.values) == ("length", {})
    assert both.values == {"word": [3 * 7 + 7]}
