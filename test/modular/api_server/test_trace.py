"""`/debug/trace`: hand-made steps and requests as a Chrome trace, and the route over a running front."""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

from support.running_front import RunningFront

from mstar.api_server.trace import DEVICE_TID, LOOP_TID, REQUESTS_PID, chrome_trace
from mstar.communication.messages import StepReport
from mstar.conductor import step_reports
from mstar.conductor.request_times import ChoiceTimes, RequestTimes

MS = 1_000_000
ROUNDING_US = 0.01
AT = datetime(2030, 1, 2, 3, 4, 5, 40_000, tzinfo=UTC)
"""When the clock of the times shows 0.04."""


def report(**changes: Any) -> StepReport:
    """Three steps of 10 ms, each handed over 5 ms before the one before it ends: a prefill, a mixed one, a decode."""
    columns: dict[str, Any] = {
        "ask": 0,
        "rank": 0,
        "nodes": ["LLM"] * 3,
        "composed_ns": [0, 4 * MS, 14 * MS],
        "submitted_ns": [1 * MS, 6 * MS, 16 * MS],
        "began_ns": [1 * MS, 6 * MS, 16 * MS],
        "ended_ns": [11 * MS, 21 * MS, 31 * MS],
        "part_steps": [0, 1, 1, 2],
        "walks": ["prefill", "decode", "prefill", "decode"],
        "part_rows": [1, 1, 1, 2],
        "part_tokens": [40, 1, 30, 2],
        "rows": [0, 0, 1, 0, 1],
        "rids": ["w-0", "w-1"],
    }
    return StepReport(**(columns | changes))


def times(request_id: str, *choices: ChoiceTimes, **changes: Any) -> RequestTimes:
    return RequestTimes(request_id, 0.0, num_prompt_tokens=40, choices=list(choices), **changes)


def complete(document: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Events by track; on each, one lies in the other or behind it, as viewers need."""
    tracks = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():
        stack: list[float] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            assert event["dur"] >= 0
            while stack and stack[-1] <= event["ts"] + ROUNDING_US:
                stack.pop()
            assert not stack or end <= stack[-1] + ROUNDING_US, "events of one track overlap"
            stack.append(end)
    return tracks


def names(document: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {
        event["args"]["name"]: (event["pid"], event["tid"]) for event in document["traceEvents"] if event["ph"] == "M"
    }


def test_steps_of_a_rank():
    document = chrome_trace([], {0: report(), 1: None}, 0.04, AT, "1")
    tracks = complete(document)
    device = tracks[1, DEVICE_TID]
    assert [event["name"] for event in device] == ["LLM prefill", "LLM decode + prefill", "LLM decode"]
    # A step that was handed over while another ran begins when that one has ended.
    assert [(event["ts"], event["dur"]) for event in device] == [(1000, 10000), (11000, 10000), (21000, 10000)]
    assert [event["args"]["rows"] for event in device] == [1, 2, 2]
    assert [event["args"]["tokens"] for event in device] == [40, 31, 2]
    assert device[1]["args"]["parts"] == [
        {"walk": "decode", "tokens": 1, "requests": ["w-0"]},
        {"walk": "prefill", "tokens": 30, "requests": ["w-1"]},
    ]
    assert [(event["ts"], event["dur"]) for event in tracks[1, LOOP_TID]] == [(0, 1000), (4000, 2000), (14000, 2000)]
    assert document["otherData"]["ranks_without_answer"] == [1]
    assert {"worker 0", "worker 1", "requests"} <= names(document).keys()


def test_times_count_from_the_first_event():
    base = 3_000_000 * 10**9  # a machine that has run for a month
    moved = {
        name: [at + base + 7 * MS for at in getattr(report(), name)]
        for name in ("composed_ns", "submitted_ns", "began_ns", "ended_ns")
    }
    document = chrome_trace([], {0: report(**moved)}, base / 1e9 + 0.04, AT, "1")
    device = complete(document)[1, DEVICE_TID]
    assert [(event["ts"], event["dur"]) for event in device] == [(1000, 10000), (11000, 10000), (21000, 10000)]
    assert document["otherData"]["began_at"] == "2030-01-02T03:04:05.007000+00:00"
    assert chrome_trace([], {}, 0.04, AT, "1")["otherData"]["began_at"] == "2030-01-02T03:04:05.040000+00:00"


def test_requests_on_nodes_and_ranks():
    done = ChoiceTimes("w-0", 0.0005, 0.011, 0.032, "stop", 3)
    runs = ChoiceTimes("w-1", 0.005, 0.021)
    other = report(rank=1, nodes=["vision"] * 3, walks=["encode"] * 4)
    document = chrome_trace(
        [times("req-a", done, ended_at=0.032), times("req-b", runs), times("req-c")],
        {0: report(), 1: other},
        0.04,
        AT,
        "1",
    )
    tracks, named = complete(document), names(document)
    whole, *phases = tracks[named["req-a"]]
    assert (whole["name"], whole["ts"], whole["dur"]) == ("request", 0, 32000)
    assert whole["args"] == {
        "request_id": "req-a",
        "id": "w-0",
        "prompt_tokens": 40,
        "outputs": 3,
        "outcome": "stop",
    }
    assert [(event["name"], event["ts"], event["dur"]) for event in phases] == [
        ("prepare", 0, 500),
        ("first output", 500, 10500),
        ("outputs", 11000, 21000),
    ]
    on_rank = tracks[named["req-a on worker 0"]]
    assert [(event["name"], event["args"]["steps"]) for event in on_rank] == [("LLM prefill", 1), ("LLM decode", 2)]
    assert [(event["ts"], event["dur"]) for event in on_rank] == [(1000, 10000), (11000, 20000)]
    assert [event["name"] for event in tracks[named["req-a on worker 1"]]] == ["vision encode"]
    assert tracks[named["req-b"]][0]["args"]["outcome"] == "running"
    assert tracks[named["req-b"]][0]["dur"] == 40000
    assert [event["name"] for event in tracks[named["req-c"]]] == ["request", "prepare"], "it is being prepared"
    assert all(pid == REQUESTS_PID for name, (pid, _) in named.items() if name.startswith("req-"))


def test_a_failed_request_with_two_choices():
    choices = [ChoiceTimes(f"w-{i}", 0.001, None, 0.02, "request_timeout") for i in range(2)]
    document = chrome_trace([times("req", *choices, ended_at=0.02, failure="request_timeout")], {}, 0.04, AT, "1")
    tracks, named = complete(document), names(document)
    for name in ("req [0]", "req [1]"):
        events = tracks[named[name]]
        assert [event["name"] for event in events] == ["request", "prepare", "first output"]
        assert events[0]["args"]["outcome"] == "request_timeout" and events[0]["dur"] == 20000


def test_the_route(front: RunningFront, monkeypatch):
    front.worker.report = report()
    answer = front.http.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 3},
        headers={"x-request-id": "traced"},
    )
    assert answer.status_code == 200
    response = front.http.get("/debug/trace?seconds=30")
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    document = response.json()
    tracks, named = complete(document), names(document)
    assert len(tracks[1, DEVICE_TID]) == 3 and document["otherData"]["ranks_without_answer"] == []
    for name in ("traced [0]", "traced [1]"):
        whole, *phases = tracks[named[name]]
        assert whole["args"]["outputs"] == 3 and whole["args"]["outcome"] == "length"
        assert [event["name"] for event in phases] == ["prepare", "first output", "outputs"]
        assert whole["ts"] + whole["dur"] <= phases[-1]["ts"] + phases[-1]["dur"] + 0.001
    front.worker.report = None
    monkeypatch.setattr(step_reports, "ANSWER_S", 0.1)
    document = front.http.get("/debug/trace").json()
    assert document["otherData"]["ranks_without_answer"] == [0] and "traced [0]" in names(document)
    assert front.http.get("/debug/trace?seconds=0.000001").json()["traceEvents"], "only what is named"
    for wrong in ("0", "-1", "nan", "inf", "3601", "x"):
        refused = front.http.get(f"/debug/trace?seconds={wrong}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "seconds", wrong
