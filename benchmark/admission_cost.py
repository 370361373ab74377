"""What taking in a prompt costs the worker: `python -m benchmark.admission_cost`.

A real worker around the null model of `benchmark.worker_phases`, on a loopback bus. Measured is the CPU time of the
loop thread (`time.thread_time_ns`) for the frame of one `StartWalk` message: decoding it, and applying it, which
interns the request, hashes the prompt into page keys, looks the prefix up, promises room, opens every resource and
starts the walk. Steps and the removal run in between and are not measured; nothing in it is a wait.

Three cases, alternating: `off` has no prefix cache, `unseen` prompts have never been there, `shared` ones have all
pages but the last in the cache.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer

from benchmark.results import load_average, machine, write_result
from benchmark.worker_phases.null_worker import (
    NullWorker,
    build_null_worker,
    full_sampling,
    plain_sampling,
    random_ids,
    start_message,
)
from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.loopback import LoopbackBus, LoopbackNet
from mstar.communication.messages import Fail, PeerUp, Remove, SamplingParams, ToFront
from mstar.communication.wire import decode_to_front, decode_to_worker, encode
from mstar.worker.assemble import WorkerSettings

MOST_US = 100.0
"""Goal: decoding and admission together, median."""
CASES = ("off", "unseen", "shared")
WARMUP = 30


class Cost(NamedTuple):
    """Nanoseconds of CPU time of the loop thread."""

    decode_ns: int
    apply_ns: int


class Intake:
    """One worker and the front's end of its bus; requests pass through one at a time."""

    def __init__(self, max_seq_len: int, *, prefix_cache: bool) -> None:
        net = LoopbackNet()
        self._front: LoopbackBus[ToFront] = net.bus("front", decode_to_front)
        settings = WorkerSettings(max_rows=8, max_waiting=8, max_step_tokens=1 << 20, overlap=False)
        self._null: NullWorker = build_null_worker(
            net.bus("worker", decode_to_worker), settings, max_seq_len, prefix_cache=prefix_cache
        )
        self._null.parts.inbox.apply([PeerUp(FRONT_RANK, 0, "front")])
        self._front.connect(peer_name(0), "worker")
        self._num_made = 0

    def admit(self, prompt_ids: np.ndarray, sampling: SamplingParams) -> Cost:
        """Take the request in, then run it to its end and remove it.

        Raises:
            RuntimeError: it failed.
        """
        rid = f"request-{self._num_made}"
        self._num_made += 1
        frame = encode(start_message(self._null.model, rid, prompt_ids, sampling))
        inbox = self._null.parts.inbox
        begin = time.thread_time_ns()
        message = decode_to_worker(frame)
        decoded = time.thread_time_ns()
        inbox.apply((message,))
        end = time.thread_time_ns()
        self._run_out()
        inbox.apply((Remove(rid),))
        self._run_out()
        return Cost(decoded - begin, end - decoded)

    def gauges(self) -> Mapping[str, float]:
        return self._null.parts.engine.gauges()

    def close(self) -> None:
        self._null.worker.close()

    def _run_out(self) -> None:
        while self._null.worker.tick_once():
            pass
        for message in self._front.receive():
            if isinstance(message, Fail):
                raise RuntimeError(f"a request failed: {message.message}")


class CaseReport(msgspec.Struct, frozen=True):
    """Microseconds: medians of the two parts, median, 90th percentile and least of their sum."""

    decode_us: float
    apply_us: float
    total_us: float
    p90_us: float
    least_us: float


def measure(prompt_tokens: int, repeats: int, *, every_option: bool = False) -> dict[str, list[Cost]]:
    """`repeats` admissions of each case, after a warm-up. `every_option`: requests use every sampling option."""
    intakes = {on: Intake(prompt_tokens + 64, prefix_cache=on) for on in (False, True)}
    sampling = full_sampling if every_option else plain_sampling
    shared = random_ids(0, prompt_tokens)
    costs: dict[str, list[Cost]] = defaultdict(list)
    collects = gc.isenabled()
    gc.disable()  # a collection is not the admission's
    try:
        for repeat in range(-WARMUP, repeats):
            unseen = random_ids([1, repeat + WARMUP], prompt_tokens)
            for case in CASES:
                prompt = shared if case == "shared" else unseen
                cost = intakes[case != "off"].admit(prompt, sampling(repeat + WARMUP, 2))
                if repeat >= 0:
                    costs[case].append(cost)
            if repeat % 50 == 0:
                gc.collect()
    finally:
        if collects:
            gc.enable()
        for intake in intakes.values():
            intake.close()
    return dict(costs)


def summarize(costs: Sequence[Cost]) -> CaseReport:
    totals = sorted((cost.decode_ns + cost.apply_ns) / 1e3 for cost in costs)
    return CaseReport(
        decode_us=round(statistics.median(cost.decode_ns for cost in costs) / 1e3, 1),
        apply_us=round(statistics.median(cost.apply_ns for cost in costs) / 1e3, 1),
        total_us=round(statistics.median(totals), 1),
        p90_us=round(totals[int(0.9 * (len(totals) - 1))], 1),
        least_us=round(totals[0], 1),
    )


def report_text(report: Mapping[str, Any]) -> str:
    columns = CaseReport.__struct_fields__
    lines = [f"{'':<8}" + "".join(f"{name:>11}" for name in columns)]
    lines.extend(f"{case:<8}" + "".join(f"{report['cases'][case][name]:>11.1f}" for name in columns) for case in CASES)
    lines.append(f"{'met' if report['enough'] else 'MISSED'}: at most {MOST_US:.0f} us in every case")
    return "\n".join(lines)


def build_report(prompt_tokens: int, repeats: int, *, every_option: bool) -> dict[str, Any]:
    """What `main` prints."""
    load = load_average()
    costs = measure(prompt_tokens, repeats, every_option=every_option)
    cases = {case: summarize(taken) for case, taken in costs.items()}
    return {
        "machine": machine(),
        "load_before": load,
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
        "every_option": every_option,
        "cases": {case: msgspec.to_builtins(found) for case, found in cases.items()},
        "enough": all(found.total_us <= MOST_US for found in cases.values()),
    }


def main(
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 600,
    repeats: Annotated[int, typer.Option(min=1)] = 500,
    every_option: Annotated[bool, typer.Option("--every-option", help="Use every sampling option.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Exit code 1 if the median of a case is over 100 us."""
    report = build_report(prompt_tokens, repeats, every_option=every_option)
    write_result("admission_cost", report)
    print(json.dumps(report) if as_json else report_text(report))
    raise typer.Exit(0 if report["enough"] else 1)


if __name__ == "__main__":
    typer.run(main)
