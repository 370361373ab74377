"""`/debug/trace`: requests and the steps of every rank as Chrome's trace events, for Perfetto and the like. Pure.

Format: "Trace Event Format" (Google): complete events (`ph: X`) with `ts` and `dur` in microseconds; on one track they
nest or follow each other. `ts` counts from the first of them, which began at `otherData.began_at`. Track 1 of a rank's
process is its loop, track 2 its device. The process of requests has, for each choice, a track with its phases and one
for each rank with the runs of nodes that had it among their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mstar.communication.messages import StepReport
from mstar.conductor.request_times import ChoiceTimes, RequestTimes

REQUESTS_PID = 0
LOOP_TID, DEVICE_TID = 1, 2
TraceEvent = dict[str, Any]


def chrome_trace(
    requests: Iterable[RequestTimes],
    reports: Mapping[int, StepReport | None],
    now: float,
    time_of_day: datetime,
    version: str,
) -> dict[str, Any]:
    """`now`: seconds of the clock that the times are of, and `time_of_day` the same moment; what still runs ends there.
    `reports`: by rank; None: it did not answer, which `otherData` tells."""
    events = [_named("process_name", REQUESTS_PID, 0, "requests")]
    runs: dict[str, dict[int, list[_Run]]] = {}
    for rank, report in reports.items():
        pid = rank + 1
        events += [
            _named("process_name", pid, 0, f"worker {rank}"),
            _named("thread_name", pid, LOOP_TID, "loop: composed to submitted"),
            _named("thread_name", pid, DEVICE_TID, "device"),
        ]
        if report is not None:
            events += _step_events(report, pid)
            _collect_runs(report, runs)
    events += _request_events(requests, runs, now)
    spans = [event for event in events if event["ph"] == "X"]
    first_us = min((span["ts"] for span in spans), default=now * 1e6)
    for span in spans:
        span["ts"] = round(span["ts"] - first_us, 3)
    began_at = time_of_day + timedelta(microseconds=first_us - now * 1e6)
    silent = [rank for rank, report in reports.items() if report is None]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"version": version, "began_at": began_at.isoformat(), "ranks_without_answer": silent},
    }


@dataclass(slots=True)
class _Run:
    """Steps of one node and walk, one after the other, that had a request among their rows. `tokens`: of all rows."""

    name: str
    begin_ns: int
    end_ns: int
    num_steps: int = 1


@dataclass(slots=True)
class _Parts:
    """The parts of a report's steps, row names resolved: by step, (walk, ids, tokens)."""

    by_step: list[list[tuple[str, Sequence[str], int]]]

    @classmethod
    def of(cls, report: StepReport) -> _Parts:
        by_step: list[list[tuple[str, Sequence[str], int]]] = [[] for _ in report.nodes]
        begin = 0
        for step, walk, count, tokens in zip(
            report.part_steps, report.walks, report.part_rows, report.part_tokens, strict=True
        ):
            rids = [report.rids[row] for row in report.rows[begin : begin + count]]
            by_step[step].append((walk, rids, tokens))
            begin += count
        return cls(by_step)


def _device_spans(report: StepReport) -> Iterator[tuple[int, int]]:
    """Begin and end of each step on the device, which runs one after the other: what was launched early waits."""
    last = 0
    for began, ended in zip(report.began_ns, report.ended_ns, strict=True):
        begin = max(began, last)
        last = max(ended, begin)
        yield begin, last


def _step_events(report: StepReport, pid: int) -> Iterator[TraceEvent]:
    parts = _Parts.of(report)
    last = 0
    for index, (begin, end) in enumerate(_device_spans(report)):
        node, mine = report.nodes[index], parts.by_step[index]
        walks = " + ".join(walk for walk, _, _ in mine)
        composed = max(report.composed_ns[index], last)
        last = max(report.submitted_ns[index], composed)
        yield _complete(f"{node} {walks}", pid, LOOP_TID, composed, last, {})
        arguments = {
            "node": node,
            "rows": sum(len(rids) for _, rids, _ in mine),
            "tokens": sum(tokens for _, _, tokens in mine),
            "parts": [{"walk": walk, "tokens": tokens, "requests": rids} for walk, rids, tokens in mine],
        }
        yield _complete(f"{node} {walks}", pid, DEVICE_TID, begin, end, arguments)


def _collect_runs(report: StepReport, runs: dict[str, dict[int, list[_Run]]]) -> None:
    parts = _Parts.of(report)
    for index, (begin, end) in enumerate(_device_spans(report)):
        for walk, rids, _ in parts.by_step[index]:
            name = f"{report.nodes[index]} {walk}"
            for rid in rids:
                mine = runs.setdefault(rid, {}).setdefault(report.rank, [])
                if mine and mine[-1].name == name:
                    mine[-1].end_ns = end
                    mine[-1].num_steps += 1
                else:
                    mine.append(_Run(name, begin, end))


def _request_events(
    requests: Iterable[RequestTimes], runs: Mapping[str, Mapping[int, Sequence[_Run]]], now: float
) -> Iterator[TraceEvent]:
    tid = 0
    for times in sorted(requests, key=lambda times: times.submitted_at):
        for index, choice in enumerate(times.choices or [ChoiceTimes("", now)]):
            tid += 1
            name = times.request_id + (f" [{index}]" if len(times.choices) > 1 else "")
            yield _named("thread_name", REQUESTS_PID, tid, name)
            yield from _phases(times, choice, tid, now)
            for rank, mine in sorted(runs.get(choice.rid, {}).items()):
                tid += 1
                yield _named("thread_name", REQUESTS_PID, tid, f"{name} on worker {rank}")
                for run in mine:
                    arguments = {"steps": run.num_steps, "id": choice.rid}
                    yield _complete(run.name, REQUESTS_PID, tid, run.begin_ns, run.end_ns, arguments)


def _phases(times: RequestTimes, choice: ChoiceTimes, tid: int, now: float) -> Iterator[TraceEvent]:
    """The choice from its submission to its end, and inside: prepared, until its first output, until its last."""
    ended = times.ended_at if choice.ended_at is None else choice.ended_at
    end = now if ended is None else ended
    arguments = {
        "request_id": times.request_id,
        "id": choice.rid,
        "prompt_tokens": times.num_prompt_tokens,
        "outputs": choice.num_outputs,
        "outcome": choice.outcome or times.failure or "running",
    }
    began, started = times.submitted_at, min(choice.started_at, end)
    yield _complete("request", REQUESTS_PID, tid, _ns(began), _ns(end), arguments)
    first = end if choice.first_at is None else choice.first_at
    for name, begin, until in (("prepare", began, started), ("first output", started, first), ("outputs", first, end)):
        if until > begin:
            yield _complete(name, REQUESTS_PID, tid, _ns(begin), _ns(until), {})


def _complete(name: str, pid: int, tid: int, begin_ns: int, end_ns: int, arguments: Mapping[str, Any]) -> TraceEvent:
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": begin_ns / 1000,
        "dur": (end_ns - begin_ns) / 1000,
        "args": arguments,
    }


def _named(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
