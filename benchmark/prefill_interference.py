"""What a long prompt does to streams that are running: `python -m benchmark.prefill_interference`.

Two engines in this process over the same weights, the real worker loop without HTTP: one cuts prompts into chunks
(`scheduler.max_step_tokens: auto`), the other computes a prompt in one step. In each repeat each of them runs some
streams twice: beside a long prompt that arrives, and alone, where the same tokens of the streams are measured, because
a token takes longer the more its stream has in its cache. Which engine goes first alternates. A time between tokens is
the time from one token of a stream to its next as the caller of the loop sees it, on the wall clock: nearly all of it
is waiting for the forward. The time to the first token of the long prompt counts from its submission.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from benchmark.local_decode import open_smollm2, random_prompts
from benchmark.results import load_average, machine, spread, write_result
from mstar.bench.report import percentile
from mstar.communication.messages import SamplingParams
from mstar.launch.deployment import Deployment
from mstar.launch.local import LocalInstance, LocalRequest
from mstar.model.base import PreparedPrompt

MOST_SLOWDOWN = 3.0
"""Goal: p99 between tokens during the long prompt, to that without it."""
LEAST_GAIN = 2.0
"""Goal: the same p99 without chunks, to that with them."""
MODES = ("chunked", "whole")
UNCUT = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """`warmup_tokens`: tokens of each stream before the long prompt arrives. Where it takes the time of fewer than
    `alone_tokens`, so many are measured alone."""

    streams: int = 8
    stream_prompt: int = 64
    stream_tokens: int = 2048
    warmup_tokens: int = 16
    alone_tokens: int = 200
    long_prompt: int = 6000


class Sample(NamedTuple):
    """One repeat of one mode: seconds between tokens of all streams, and of the long prompt to its first token."""

    alone: list[float]
    during: list[float]
    ttft_s: float


class Streams:
    """Running requests and when each had its last token."""

    def __init__(self, instance: LocalInstance, prompts: np.ndarray, output_tokens: int) -> None:
        self._instance = instance
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens)
        self._requests = [instance.submit(PreparedPrompt(prompt), sampling) for prompt in prompts]
        self._seen = [0] * len(self._requests)
        self._at = [0.0] * len(self._requests)
        self._cpu_at = list(self._at)
        self.gaps: list[float] = []
        """Seconds between tokens since it was last emptied."""
        self.cpu_gaps: list[float] = []
        """The same in CPU time of this process."""

    @property
    def least_tokens(self) -> int:
        return min(self._seen)

    def tick(self) -> float:
        """One tick of the loop; returns when it ended."""
        self._instance.tick()
        now, cpu_now = time.perf_counter(), time.process_time()
        for index, request in enumerate(self._requests):
            if request.failure is not None or request.finished:
                raise RuntimeError(f"a stream ended while it was measured: {request.failure or 'too few tokens'}")
            count = len(request.tokens["token"])
            if count > self._seen[index]:
                if self._seen[index]:
                    more = count - self._seen[index]
                    self.gaps.append((now - self._at[index]) / more)
                    self.cpu_gaps.append((cpu_now - self._cpu_at[index]) / more)
                self._seen[index], self._at[index], self._cpu_at[index] = count, now, cpu_now
        return now

    def run(self, num_tokens: int) -> list[float]:
        """Until each stream has so many more tokens; the times between them."""
        self.gaps = []
        target = self.least_tokens + num_tokens
        while self.least_tokens < target:
            self.tick()
        return self.gaps

    def leave(self, *others: LocalRequest) -> None:
        for request in (*self._requests, *others):
            self._instance.remove(request)
        self._instance.tick()  # reads the removal, which the next tick begins with
        while self._instance.tick():
            pass


def measure_once(instance: LocalInstance, shape: Shape, seed: int) -> Sample:
    """One repeat. The long prompt is never one that was seen before."""
    vocab_size = instance.model.vocab_size()
    prompts = random_prompts(shape.streams, shape.stream_prompt, vocab_size, seed)

    def started() -> Streams:
        streams = Streams(instance, prompts, shape.stream_tokens)
        streams.run(shape.warmup_tokens)
        streams.gaps = []
        return streams

    streams = started()
    begun_with = streams.least_tokens
    (prompt,) = random_prompts(1, shape.long_prompt, vocab_size, seed + 1_000_000)
    begin = now = time.perf_counter()
    long = instance.submit(PreparedPrompt(prompt), SamplingParams(temperature=0.0, max_tokens=4))
    while not long.tokens["token"]:
        if long.failure is not None:
            raise RuntimeError(f"the long prompt failed: {long.failure}")
        now = streams.tick()
    streams.tick()  # the step in which the prompt was computed whole shows at the stream's token after it
    during, num_tokens = streams.gaps, streams.least_tokens - begun_with
    streams.leave(long)
    streams = started()
    alone = streams.run(max(num_tokens, shape.alone_tokens))
    streams.leave()
    return Sample(alone, during, now - begin)


def compare(instances: Mapping[str, LocalInstance], shape: Shape, repeats: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = defaultdict(list)
    for repeat in range(repeats):
        for mode in MODES if repeat % 2 == 0 else reversed(MODES):
            samples[mode].append(measure_once(instances[mode], shape, seed=repeat))
    return dict(samples)


def summarize(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Percentiles and ratios repeat by repeat, then their median, least and most."""
    report: dict[str, Any] = {}
    for mode, taken in samples.items():
        entry: dict[str, Any] = {"ttft_ms": spread([one.ttft_s * 1e3 for one in taken])}
        for when in ("alone", "during"):
            gaps = [sorted(getattr(one, when)) for one in taken]
            entry[f"tokens_{when}"] = spread([float(len(one)) for one in gaps])
            for percent in (50, 99):
                entry[f"itl_{when}_ms_p{percent}"] = spread([percentile(one, percent) * 1e3 for one in gaps])
        entry["slowdown_p50"] = spread([_p(one.during, 50) / _p(one.alone, 50) for one in taken])
        entry["slowdown_p99"] = spread([_p(one.during, 99) / _p(one.alone, 99) for one in taken])
        report[mode] = entry
    pairs = list(zip(samples["chunked"], samples["whole"], strict=True))
    report["gain_p99"] = spread([_p(whole.during, 99) / _p(cut.during, 99) for cut, whole in pairs])
    report["ttft_chunked_to_whole"] = spread([cut.ttft_s / whole.ttft_s for cut, whole in pairs])
    report["goals"] = {
        f"p99 during the long prompt <= {MOST_SLOWDOWN} x alone": report["chunked"]["slowdown_p99"]["median"]
        <= MOST_SLOWDOWN,
        f"p99 without chunks >= {LEAST_GAIN} x with them": report["gain_p99"]["median"] >= LEAST_GAIN,
    }
    return report


def report_text(report: Mapping[str, Any]) -> str:
    columns = ("itl_alone_ms_p50", "itl_alone_ms_p99", "itl_during_ms_p50", "itl_during_ms_p99", "slowdown_p99")
    lines = [f"{'':<10}" + "".join(f"{name:>19}" for name in (*columns, "ttft_ms"))]
    for mode in MODES:
        values = [report[mode][name]["median"] for name in (*columns, "ttft_ms")]
        lines.append(f"{mode:<10}" + "".join(f"{value:>19.2f}" for value in values))
    lines.append(
        f"without chunks p99 is {report['gain_p99']['median']:.1f} times as long; the long prompt's first token takes "
        f"{report['ttft_chunked_to_whole']['median']:.2f} times as long with them"
    )
    lines.extend(f"{'met   ' if met else 'MISSED'} {goal}" for goal, met in report["goals"].items())
    return "\n".join(lines)


def open_instances(shape: Shape, threads: int, chunk_tokens: str) -> dict[str, LocalInstance]:
    """An engine per mode; caches hold all that runs."""
    longest = max(shape.long_prompt + 64, shape.stream_prompt + shape.stream_tokens)
    tokens = shape.streams * (shape.stream_prompt + shape.stream_tokens) + shape.long_prompt
    pages = -(-tokens // 64) + 4 * (shape.streams + 1)

    def deployment(step_tokens: str | int) -> Deployment:
        overrides = [f"scheduler.max_step_tokens={step_tokens}", f"resources.kv.num_pages={pages}"]
        return open_smollm2(threads, shape.streams + 1, longest, overrides)

    return {"chunked": LocalInstance(deployment(chunk_tokens)), "whole": LocalInstance(deployment(UNCUT))}


def main(
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Running streams.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Of the long prompt.")] = 6000,
    chunk_tokens: Annotated[str, typer.Option(help="scheduler.max_step_tokens of the engine that cuts.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Exit code 1 if a goal is missed."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    shape = Shape(streams=streams, long_prompt=prompt_tokens)
    load = load_average()
    instances = open_instances(shape, threads, chunk_tokens)
    samples = compare(instances, shape, repeats)
    for instance in instances.values():
        instance.close()
    report = {
        "machine": machine(),
        "load_before": load,
        "streams": streams,
        "prompt_tokens": prompt_tokens,
        "chunk_tokens": chunk_tokens,
        "repeats": repeats,
        **summarize(samples),
    }
    write_result("prefill_interference", report)
    print(json.dumps(report) if as_json else report_text(report))
    raise typer.Exit(0 if all(report["goals"].values()) else 1)


def _p(gaps: Sequence[float], percent: int) -> float:
    return percentile(sorted(gaps), percent)


if __name__ == "__main__":
    typer.run(main)
