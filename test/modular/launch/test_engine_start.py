"""What the log of a worker says while its walks are captured."""

import logging

import pytest

from mstar.launch.engine_start import CaptureLog


def test_captures_are_told_with_the_time_that_is_left(caplog: pytest.LogCaptureFixture):
    """Times by hand: behind 3 of 6 captures in 6 s, 6 s are left; a line every 2 s at most."""
    clock = iter([100.0, 101.0, 103.0, 106.0, 107.5, 109.0, 109.5])
    progress = CaptureLog(lambda: next(clock))
    with caplog.at_level(logging.INFO, logger="mstar.launch.engine_start"):
        for done in range(6):
            progress("capture LLM decode" if done < 4 else "capture LLM prefill", done, 6)
        progress("capture", 6, 6)
    assert caplog.messages == [
        "capture LLM decode, 1 of 6",
        "capture LLM decode, 3 of 6, about 6 s left",  # 2 in 3 s
        "capture LLM decode, 4 of 6, about 6 s left",
        "capture LLM prefill, 6 of 6, about 2 s left",  # 5 in 9 s: 1.8
        "capture: 6 of 6 done in 9.5 s",
    ]


def test_a_second_round_has_a_time_of_its_own(caplog: pytest.LogCaptureFixture):
    clock = iter([0.0, 50.0, 50.1, 54.1])
    progress = CaptureLog(lambda: next(clock))
    with caplog.at_level(logging.INFO, logger="mstar.launch.engine_start"):
        progress("capture LLM decode", 0, 1)
        progress("capture", 1, 1)
        progress("capture EYE blocks", 0, 2)
        progress("capture EYE blocks", 1, 2)
    assert caplog.messages[2:] == ["capture EYE blocks, 1 of 2", "capture EYE blocks, 2 of 2, about 4 s left"]
