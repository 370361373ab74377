"""Stage clocks: CPU time goes to the stage that used it, waiting is kept apart."""

import threading
import time

from mstar.profile.phases import PHASES, WAITS, PhaseRecorder, PhaseTotals


def burn(seconds: float) -> None:
    """CPU time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def one_tick(clock, *, step_ended: bool = True) -> None:
    clock.begin()
    for phase in PHASES:
        if phase == "compose":
            burn(0.02)
        if phase == "await_gpu":
            threading.Event().wait(0.05)
        clock.mark(phase)
    clock.end(step_ended)


def test_a_recorder_keeps_ticks_in_which_a_step_ended():
    recorder = PhaseRecorder(limit=2)
    for step_ended in (True, False, True, True):
        one_tick(recorder, step_ended=step_ended)
    assert len(recorder.ticks) == 2
    for tick in recorder.ticks:
        assert 0.02e9 <= tick.cpu_ns["compose"] < 0.05e9
        assert tick.cpu_ns["await_gpu"] < 0.02e9
        assert tick.wait_ns["await_gpu"] >= 0.04e9
        assert tick.wait_ns["event_sync"] < 0.02e9
        assert set(tick.cpu_ns) == set(PHASES)


def test_totals_add_up_over_ticks_and_name_every_stage():
    totals = PhaseTotals()
    one_tick(totals)
    one_tick(totals, step_ended=False)
    gauges = totals.gauges()
    assert 0.04 <= gauges['mstar_phase_cpu_seconds_total{phase="compose"}'] < 0.1
    assert gauges['mstar_phase_wait_seconds_total{phase="await_gpu"}'] >= 0.08
    assert len(gauges) == len(PHASES) + len(WAITS)
