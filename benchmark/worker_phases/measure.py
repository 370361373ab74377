"""Runs a real worker over the null model and takes its stage times.

One process is the worker, as in a deployment: threaded executor, ZMQ sockets. A second process drains what it sends,
and sends it the prompts that arrive meanwhile.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmark.worker_phases.consumer import ARRIVAL, Consumed, write_arrivals
from benchmark.worker_phases.null_model import build_null_model
from benchmark.worker_phases.null_worker import (
    NullWorker,
    build_null_worker,
    full_sampling,
    plain_sampling,
    random_ids,
    start_message,
)
from mstar.communication.address import FRONT_RANK
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import PeerUp, Remove, StartWalk, ToWorker
from mstar.communication.wire import decode_to_worker
from mstar.profile.phases import PHASES, WAITS, PhaseRecorder, Tick
from mstar.worker.assemble import WorkerSettings
from mstar.worker.worker import Worker, WorkerParts

PROMPT_TOKENS = 40
WARMUP_STEPS = 32
"""Decode steps before the measured ones: buffers have grown, and the graph knows that tokens go on live."""
ARRIVING_TOKENS = 600
"""Of a prompt that arrives; the first `SHARED_TOKENS` are those of all others."""
SHARED_TOKENS = 320
ARRIVING_OUTPUT = 4
CHUNK_TOKENS = 128
"""Room in a step beside the decoding rows."""
MOST_ARRIVED = 16
"""Rows for requests that arrived and have not left."""
HOST_BYTES = 1 << 20
DRAIN_S = 60


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """`rows` requests decode `steps` measured steps. `device_us`: how long the null forward takes. `overlap`: the async
    loop on a threaded executor, or the plain loop. `full`: every sampling option on every row, a host pool, and pages
    of generated tokens kept for reuse. `arrivals_every`: a prompt arrives with every so many steps (0: none do).

    Without arrivals all rows stop with the last measured step; with them after it.
    """

    rows: int
    steps: int
    device_us: int = 1000
    overlap: bool = True
    full: bool = False
    arrivals_every: int = 0

    @property
    def mode(self) -> str:
        name = "full" if self.full else "plain"
        return f"{name}, a prompt every {self.arrivals_every} steps" if self.arrivals_every else name

    @property
    def first_steps(self) -> int:
        """Steps that are not measured; in the first ones the prompts are computed."""
        chunks = -(-self.rows * PROMPT_TOKENS // CHUNK_TOKENS) if self.arrivals_every else 1
        return chunks + WARMUP_STEPS

    @property
    def stop_iteration(self) -> int:
        """The decode step, counted from 0, in which a row stops."""
        beyond = self.first_steps if self.arrivals_every else 0
        return WARMUP_STEPS + self.steps - 1 + beyond

    @property
    def max_tokens(self) -> int:
        """Room for more, so that it is the stop token that ends a row."""
        return self.stop_iteration + 64

    @property
    def max_seq_len(self) -> int:
        return max(PROMPT_TOKENS + self.max_tokens, ARRIVING_TOKENS + ARRIVING_OUTPUT)

    @property
    def settings(self) -> WorkerSettings:
        if self.arrivals_every:
            return WorkerSettings(
                max_rows=self.rows + MOST_ARRIVED,
                max_waiting=1024,
                max_step_tokens=self.rows + CHUNK_TOKENS,
                overlap=self.overlap,
            )
        return WorkerSettings(
            max_rows=self.rows, max_waiting=0, max_step_tokens=self.rows * PROMPT_TOKENS, overlap=self.overlap
        )


class Counters(NamedTuple):
    """Of the worker at one moment."""

    frames: int
    messages: int
    num_bytes: int
    pages: int
    speculated: int
    prefill_tokens: int


class PhaseReport(msgspec.Struct, frozen=True):
    """`mode`: see `PhaseRun`. `phases_us`: median CPU time of the loop thread by stage. `waits_us`: median time that
    the stages of `WAITS` spent waiting, on the wall clock. `total_us`: CPU time of a step over all stages, median over
    steps, and `spread_us`, its interquartile range. `ops`: what the measured steps did, counted where it happened."""

    mode: str
    rows: int
    steps: int
    phases_us: dict[str, float]
    waits_us: dict[str, float]
    total_us: float
    spread_us: float
    ops: dict[str, int]


def measure(run: PhaseRun) -> PhaseReport:
    """Run it once.

    Raises:
        RuntimeError: a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="mstar-phases-") as directory:
        folder = Path(directory)
        front, own = (f"ipc://{folder / name}" for name in ("front", "worker"))
        command = [sys.executable, "-m", "benchmark.worker_phases.consumer", front, str(run.rows)]
        if run.arrivals_every:
            frames = folder / "arrivals"
            write_arrivals(frames, _arrivals(run))
            command += [own, str(frames), str(run.arrivals_every)]
        consumer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert consumer.stdout is not None
        try:
            consumer.stdout.readline()
            ticks, before, after, consumed = _decode(run, own, front, consumer)
        finally:
            consumer.kill()
            consumer.wait()
    if consumed.failures:
        raise RuntimeError(f"requests failed: {consumed.failures[0]}")
    ops = {
        "rows": sum(consumed.tokens_by_frame[-run.steps :]),
        "pages": after.pages - before.pages,
        "messages": after.messages - before.messages,
        "frames": after.frames - before.frames,
        "bytes": after.num_bytes - before.num_bytes,
        "stops": consumed.stops,
        "speculated_steps": after.speculated - before.speculated,
    }
    if run.arrivals_every:
        # Rows stop after the measured steps, and arrivals share their frames.
        ops = {name: ops[name] for name in ("messages", "frames", "bytes", "speculated_steps")}
        ops["arrived"] = consumed.arrived
        ops["prefill_tokens"] = after.prefill_tokens - before.prefill_tokens
    return summarize(run, ticks, ops)


def summarize(run: PhaseRun, ticks: Sequence[Tick], ops: dict[str, int]) -> PhaseReport:
    totals = [sum(tick.cpu_ns.values()) / 1e3 for tick in ticks]
    low, _, high = statistics.quantiles(totals, n=4)
    return PhaseReport(
        mode=run.mode,
        rows=run.rows,
        steps=len(ticks),
        phases_us={phase: _median_us(tick.cpu_ns[phase] for tick in ticks) for phase in PHASES},
        waits_us={phase: _median_us(tick.wait_ns[phase] for tick in ticks) for phase in PHASES if phase in WAITS},
        total_us=round(statistics.median(totals), 1),
        spread_us=round(high - low, 1),
        ops=ops,
    )


def build_worker(run: PhaseRun, bus: ZmqBus[ToWorker], recorder: PhaseRecorder) -> tuple[Worker, WorkerParts]:
    """A worker whose only node is the null model's, with all `run.rows` requests open and none started a step."""
    null = build_null_worker(
        bus,
        run.settings,
        run.max_seq_len,
        device_s=run.device_us / 1e6,
        stop_iteration=run.stop_iteration,
        reuse_generated=run.full,
        host_bytes=HOST_BYTES if run.full else 0,
        clock=recorder,
    )
    null.parts.inbox.apply(_starts(run, null))
    return null.worker, null.parts


def _starts(run: PhaseRun, null: NullWorker) -> list[StartWalk]:
    sampling = full_sampling if run.full else plain_sampling
    return [
        start_message(
            null.model, f"request-{index}", random_ids([0, index], PROMPT_TOKENS), sampling(index, run.max_tokens)
        )
        for index in range(run.rows)
    ]


def _arrivals(run: PhaseRun) -> list[StartWalk]:
    """As many as can be asked for."""
    model = build_null_model(run.max_seq_len)
    sampling = full_sampling if run.full else plain_sampling
    shared = random_ids(1, SHARED_TOKENS)
    return [
        start_message(
            model,
            f"{ARRIVAL}{index}",
            np.concatenate((shared, random_ids([2, index], ARRIVING_TOKENS - SHARED_TOKENS))),
            sampling(index, ARRIVING_OUTPUT),
        )
        for index in range((run.first_steps + run.steps) // run.arrivals_every)
    ]


def _decode(
    run: PhaseRun, own: str, front: str, consumer: subprocess.Popen[str]
) -> tuple[list[Tick], Counters, Counters, Consumed]:
    """Prefill and warm-up, then the measured ticks with the counters around them, then everything is torn down."""
    bus: ZmqBus[ToWorker] = ZmqBus(own, decode_to_worker)
    recorder = PhaseRecorder(limit=run.first_steps + run.steps)
    worker, parts = build_worker(run, bus, recorder)
    try:
        parts.inbox.apply([PeerUp(FRONT_RANK, 0, front)])
        parts.engine.warmup()
        _tick_until(worker, recorder, run.first_steps)
        recorder.ticks.clear()
        before = _counters(parts)
        _tick_until(worker, recorder, run.steps)
        after = _counters(parts)
        ticks = list(recorder.ticks)
        if not run.arrivals_every:
            parts.inbox.apply([Remove(f"request-{index}") for index in range(run.rows)])
        deadline = time.monotonic() + DRAIN_S
        while worker.tick_once() or (run.arrivals_every and consumer.poll() is None):
            if time.monotonic() > deadline:
                raise RuntimeError(f"requests have not ended {DRAIN_S} s after the measured steps")
        consumed = msgspec.json.decode(consumer.communicate(timeout=DRAIN_S)[0], type=Consumed)
    finally:
        worker.close()
        bus.close()
    return ticks, before, after, consumed


def _tick_until(worker: Worker, recorder: PhaseRecorder, num_steps: int) -> None:
    while len(recorder.ticks) < num_steps:
        worker.tick_once()


def _counters(parts: WorkerParts) -> Counters:
    sent = parts.bus.counters
    pages = int(parts.engine.gauges()['mstar_pages{pool="kv",state="owned"}'])
    return Counters(
        sent.num_frames_sent,
        sent.num_sent,
        sent.num_bytes_sent,
        pages,
        parts.counters.speculated,
        parts.counters.num_prefill_tokens,
    )


def _median_us(values: Iterable[int]) -> float:
    return round(statistics.median(values) / 1e3, 1)
