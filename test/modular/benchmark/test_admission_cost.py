"""The admission harness takes in what it says, and its summary is that of its times."""

import json

import pytest

import benchmark.admission_cost as admission_cost
from benchmark.admission_cost import CASES, Cost, Intake, build_report, measure, report_text, summarize
from benchmark.worker_phases.null_worker import full_sampling, plain_sampling, random_ids


@pytest.mark.parametrize("every_option", [False, True])
def test_every_case_is_measured_and_leaves_nothing(every_option):
    costs = measure(200, repeats=3, every_option=every_option)
    assert {case: len(taken) for case, taken in costs.items()} == dict.fromkeys(CASES, 3)
    assert all(0 < cost.decode_ns < 1e8 and 0 < cost.apply_ns < 1e8 for taken in costs.values() for cost in taken)


def test_requests_run_to_their_end_and_give_their_pages_back():
    intake = Intake(300, prefix_cache=False)
    for seed, sampling in enumerate((plain_sampling, full_sampling)):
        intake.admit(random_ids(seed, 200), sampling(seed, 2))
        assert intake.gauges()['mstar_pages{pool="kv",state="owned"}'] == 0
    intake.close()


def test_a_request_that_fails_is_no_measurement():
    intake = Intake(100, prefix_cache=False)
    with pytest.raises(RuntimeError, match="holds"):
        intake.admit(random_ids(0, 200), plain_sampling(0, 2))
    intake.close()


def test_summary_by_hand():
    report = summarize([Cost(1_000 * n, 10_000 * n) for n in range(1, 12)])
    assert (report.decode_us, report.apply_us, report.total_us) == (6.0, 60.0, 66.0)
    assert (report.p90_us, report.least_us) == (110.0, 11.0)


def test_over_the_goal_is_missed(monkeypatch):
    monkeypatch.setattr(admission_cost, "MOST_US", 0.001)
    report = build_report(100, 2, every_option=False)
    assert not report["enough"]
    assert "MISSED" in report_text(report)
    assert json.loads(json.dumps(report))["cases"]["unseen"]["total_us"] > 0
