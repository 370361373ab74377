"""Workers that come, fall silent, hang, die and return, in any order of what is said about them."""

import pytest
from support.composite.deployment import CONFIG, PLACEMENTS
from support.composite.model import CompositeModel
from support.conductor_rig import ConductorRig

from mstar import __version__
from mstar.communication.messages import Heartbeat, Hello, PeerLost, PeerUp, Ready, Remove, StartWalk
from mstar.communication.wire import schema_hash
from mstar.conductor.events import Failure
from mstar.model.base import ModelSetup


def new_rig(placement: str = "one_worker") -> ConductorRig:
    return ConductorRig(CompositeModel(ModelSetup(CONFIG, None, 64)), PLACEMENTS[placement])


def why_not(rig: ConductorRig) -> str | None:
    return rig.workers.why_not_ready(rig.time.now)


def test_ready_needs_every_worker_connected_and_ready():
    rig = new_rig("codec_apart")
    assert "worker 0 is starting" in (why_not(rig) or "")
    rig.bring_up(0)
    rig.say(Ready(rank=1, incarnation=0, max_total_tokens=0))
    assert why_not(rig) == "worker 1 is starting"
    assert rig.num_ready_calls == 0
    rig.say(PeerUp(1, 0, "w1.0"))
    assert why_not(rig) is None
    assert rig.num_ready_calls == 1


def test_silence_turns_a_worker_red_after_the_watchdog_time_and_fails_its_requests_once():
    rig = new_rig()
    rig.bring_up()
    stream = rig.submit()
    rig.time.pass_time(6)
    rig.beat()
    rig.time.pass_time(9.9)
    assert why_not(rig) is None and rig.events(stream) == [], "a timer looks again, it does not count from its start"
    rig.time.pass_time(0.2)
    assert "no heartbeat" in (why_not(rig) or "")
    (failure,) = rig.events(stream)
    assert failure.status == 503
    assert rig.time.pass_time(1000) == 0, "nothing runs while nothing can change"


def test_a_worker_that_speaks_again_is_well_and_frees_what_was_failed():
    rig = new_rig()
    rig.bring_up()
    rig.submit()
    rig.time.pass_time(11)
    assert [type(m) for m in rig.sent()] == [StartWalk, StartWalk, Remove]
    rig.beat()
    assert why_not(rig) is None
    rig.time.pass_time(11)
    assert why_not(rig) is not None, "the watchdog runs again"


def test_a_long_step_is_well_until_step_timeout():
    rig = new_rig()
    rig.bring_up()
    stream = rig.submit()
    rig.beat(step_age_s=59)
    assert why_not(rig) is None and rig.events(stream) == []
    rig.beat(step_age_s=61)
    assert "in one step for 61 s" in (why_not(rig) or "")
    assert [event.status for event in rig.events(stream)] == [503]
    rig.beat(step_age_s=0)
    assert why_not(rig) is None


def test_the_log_tells_of_silence_and_recovery_once(caplog):
    caplog.set_level("INFO", logger="mstar.conductor")
    rig = new_rig("codec_apart")
    rig.bring_up()
    assert caplog.messages == [], "a start is the supervisor's to tell"
    rig.time.pass_time(6)
    rig.beat(1)
    rig.time.pass_time(6)
    rig.beat(1)
    rig.time.pass_time(9)
    rig.beat(1)
    rig.time.pass_time(9)
    said = "worker 0 has sent no heartbeat for 10.0 s; its requests fail until it is well"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", said)]
    caplog.clear()
    for step_age_s in (0, 0, 61, 62, 63, 0, 0):
        rig.beat(0, step_age_s=step_age_s)
    assert caplog.messages == [
        "worker 0 is well again",
        "worker 0 has been in one step for 61 s; its requests fail until it is well",
        "worker 0 is well again",
    ]


def test_the_log_tells_that_a_restarted_worker_is_ready_and_repeats_no_loss(caplog):
    caplog.set_level("INFO", logger="mstar.conductor")
    rig = new_rig("codec_apart")
    rig.bring_up()
    rig.say(PeerLost(0, 0, "killed"))
    rig.time.pass_time(9)
    rig.beat(1)
    rig.time.pass_time(9)
    assert caplog.messages == [], "the supervisor has told of it"
    rig.bring_up(0, incarnation=2)
    rig.say(Ready(rank=0, incarnation=2, max_total_tokens=0))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "worker 0 is ready again, after restart 2")
    ]


def test_start_up_has_no_watchdog():
    rig = new_rig()
    rig.say(PeerUp(0, 0, "w0.0"), Heartbeat(rank=0, incarnation=0, step_age_s=0, gauges={}))
    rig.time.pass_time(500)
    assert why_not(rig) == "worker 0 is starting"


def test_a_lost_worker_fails_its_requests_at_once_and_no_others():
    rig = new_rig("codec_apart")
    rig.bring_up()
    stream = rig.submit()
    rig.sent(0)
    rig.say(PeerLost(1, 0, "killed by signal 9"))
    assert rig.events(stream) == [
        Failure(503, "worker_lost", "worker 1 has ended: killed by signal 9", retry_after_s=2)
    ]
    assert rig.sent(0) == [Remove("r0")], "the survivor frees what it has"
    assert "worker 1 has ended" in (why_not(rig) or "")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_restarted_worker_is_ready_whatever_comes_first(order: tuple[int, ...]):
    """`Ready` comes from the worker, the other two from the supervisor: no order between them."""
    rig = new_rig()
    rig.bring_up()
    stream = rig.submit()
    rig.net.bus("w0.1", lambda frame: frame)
    news = [
        PeerLost(0, 0, "killed"),
        PeerUp(0, 1, "w0.1"),
        Ready(rank=0, incarnation=1, max_total_tokens=77),
    ]
    for index in order:
        rig.say(news[index])
    assert why_not(rig) is None
    assert rig.workers.num_restarts == 1
    assert rig.workers.max_total_tokens == 77
    assert [event.status for event in rig.events(stream)] == [503]


def test_messages_of_a_dead_incarnation_change_nothing():
    rig = new_rig()
    rig.bring_up()
    rig.say(PeerLost(0, 0, "killed"))
    rig.beat()
    rig.say(Ready(rank=0, incarnation=0, max_total_tokens=0), PeerUp(0, 0, "w0.0"))
    assert "has ended" in (why_not(rig) or "")


def test_a_worker_of_another_version_is_refused_by_name():
    rig = new_rig()
    rig.say(Hello(rank=0, incarnation=0, version="9.9.9", schema_hash=schema_hash(), pid=1))
    rig.bring_up()
    assert "9.9.9" in (why_not(rig) or "")
    rig.say(Hello(rank=0, incarnation=1, version=__version__, schema_hash=schema_hash(), pid=1))
    rig.bring_up(incarnation=1)
    assert why_not(rig) is None


def test_news_of_the_front_itself_is_ignored():
    rig = new_rig()
    rig.bring_up()
    rig.say(PeerUp(-1, 0, "front"), PeerLost(-1, 0, ""))
    assert why_not(rig) is None


def test_gauges_of_workers_add_up_and_die_with_them():
    rig = new_rig("codec_apart")
    rig.bring_up()
    rig.beat(0, mstar_handles=2.0)
    rig.beat(1, mstar_handles=3.0, mstar_tensors=1.0)
    assert rig.workers.summed_gauges() == {"mstar_handles": 5.0, "mstar_tensors": 1.0}
    rig.say(PeerLost(1, 0, ""))
    assert rig.workers.summed_gauges() == {"mstar_handles": 2.0}


def test_a_request_bound_is_the_smallest_of_all_workers():
    rig = new_rig("codec_apart")
    assert rig.workers.max_total_tokens is None
    rig.say(Ready(rank=0, incarnation=0, max_total_tokens=0))
    rig.say(Ready(rank=1, incarnation=0, max_total_tokens=300))
    assert rig.workers.max_total_tokens == 300
