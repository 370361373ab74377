"""Runs a real worker over the null model and takes its stage times.

One process is the worker, as in a deployment: threaded executor, ZMQ sockets. A second process drains what it sends.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmark.worker_phases.consumer import Consumed
from benchmark.worker_phases.null_model import STOP_TOKEN, VOCAB_SIZE, NullSubmodule, build_null_model
from mstar.communication import host_tensors
from mstar.communication.address import FRONT_RANK
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import OpenRequest, PeerUp, Remove, SamplingParams, StartWalk, ToWorker
from mstar.communication.wire import decode_to_worker
from mstar.engine.engine_config import EngineConfig
from mstar.graph.compile import compile_walks
from mstar.model.base import PreparedPrompt
from mstar.model.llama.model import NODE
from mstar.platforms.executor import InlineExecutor, ThreadedExecutor
from mstar.profile.phases import PHASES, WAITS, PhaseRecorder, Tick
from mstar.worker.assemble import WorkerSettings, assemble_worker
from mstar.worker.worker import Worker, WorkerParts

PROMPT_TOKENS = 40
WARMUP_STEPS = 32
"""Decode steps before the measured ones: buffers have grown, and the graph knows that tokens go on live."""


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """`rows` requests decode `steps` measured steps; all stop with the last of them. `device_us`: how long the null
    forward takes. `overlap`: the async loop on a threaded executor, or the plain loop."""

    rows: int
    steps: int
    device_us: int = 1000
    overlap: bool = True

    @property
    def stop_iteration(self) -> int:
        """The last measured decode step, counted from 0."""
        return WARMUP_STEPS + self.steps - 1

    @property
    def max_tokens(self) -> int:
        """Room for more, so that it is the stop token that ends a row."""
        return self.stop_iteration + 64


class Counters(NamedTuple):
    """Of the worker at one moment."""

    frames: int
    messages: int
    num_bytes: int
    pages: int
    speculated: int


class PhaseReport(msgspec.Struct, frozen=True):
    """`phases_us`: median CPU time of the loop thread by stage. `waits_us`: median time that the stages of `WAITS`
    spent waiting, on the wall clock. `total_us`: CPU time of a step over all stages, median over steps, and
    `spread_us`, its interquartile range. `ops`: what the measured steps did, counted where it happened."""

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
        front, own = (f"ipc://{Path(directory) / name}" for name in ("front", "worker"))
        command = [sys.executable, "-m", "benchmark.worker_phases.consumer", front, str(run.rows)]
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
    return summarize(run, ticks, ops)


def summarize(run: PhaseRun, ticks: Sequence[Tick], ops: dict[str, int]) -> PhaseReport:
    totals = [sum(tick.cpu_ns.values()) / 1e3 for tick in ticks]
    low, _, high = statistics.quantiles(totals, n=4)
    return PhaseReport(
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
    model = build_null_model(PROMPT_TOKENS + run.max_tokens)
    settings = WorkerSettings(
        max_rows=run.rows, max_waiting=0, max_step_tokens=run.rows * PROMPT_TOKENS, overlap=run.overlap
    )
    config = EngineConfig(max_rows=run.rows, max_seq_len=PROMPT_TOKENS + run.max_tokens, capacity=settings.capacity)
    worker, parts = assemble_worker(
        compiled=compile_walks(model.walks(), model.partitions(), {NODE: 0}),
        nodes={NODE: NullSubmodule(run.device_us / 1e6, run.stop_iteration)},
        specs=model.get_node_resources(),
        bus=bus,
        executor=ThreadedExecutor() if run.overlap else InlineExecutor(),
        engine_config=config,
        settings=settings,
        clock=recorder,
    )
    rng = np.random.default_rng(0)
    starts = []
    for index in range(run.rows):
        prompt_ids = rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32)
        plan = model.plan_walks(PreparedPrompt(prompt_ids), run.max_tokens)
        opening = OpenRequest(
            sampling=SamplingParams(seed=index, max_tokens=run.max_tokens, stop_token_ids=(STOP_TOKEN,)),
            prompt_ids=host_tensors.from_numpy(prompt_ids),
            limits=dict(plan.limits),
        )
        (part,) = plan.partitions
        starts.append(
            StartWalk(rid=f"request-{index}", partition=part.partition, walks=part.walks, last=True, open=opening)
        )
    parts.inbox.apply(starts)
    return worker, parts


def _decode(
    run: PhaseRun, own: str, front: str, consumer: subprocess.Popen[str]
) -> tuple[list[Tick], Counters, Counters, Consumed]:
    """Prefill and warm-up, then the measured ticks with the counters around them, then everything is torn down."""
    bus: ZmqBus[ToWorker] = ZmqBus(own, decode_to_worker)
    recorder = PhaseRecorder(limit=WARMUP_STEPS + run.steps + 1)
    worker, parts = build_worker(run, bus, recorder)
    try:
        parts.inbox.apply([PeerUp(FRONT_RANK, 0, front)])
        parts.engine.warmup()
        _tick_until(worker, recorder, 1 + WARMUP_STEPS)
        recorder.ticks.clear()
        before = _counters(parts)
        _tick_until(worker, recorder, run.steps)
        after = _counters(parts)
        ticks = list(recorder.ticks)
        parts.inbox.apply([Remove(f"request-{index}") for index in range(run.rows)])
        while worker.tick_once():
            pass
        consumed = msgspec.json.decode(consumer.communicate(timeout=60)[0], type=Consumed)
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
    return Counters(sent.num_frames_sent, sent.num_sent, sent.num_bytes_sent, pages, parts.counters.speculated)


def _median_us(values: Iterable[int]) -> float:
    return round(statistics.median(values) / 1e3, 1)
