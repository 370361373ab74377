"""Where the device's time goes in one shape of `benchmark.engine_bench`, by torch's profiler: a run of its own, whose
times are never reported as speed. On the loop's thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from benchmark.engine_runs import Shape, submit, tick
from mstar.launch.local import LocalInstance

DECODE_STEPS = 24
MOST_SHOWN = 24


class Span(NamedTuple):
    """One kernel or copy on the device, in microseconds of the profiler's clock."""

    name: str
    begin_us: float
    end_us: float


def profile(instance: LocalInstance, shape: Shape) -> dict[str, Any]:
    """Of decode rows, the steps after all of them have a token; of prefill rows, those until then.

    `steps` they are; per step `busy_us` in which the device did something, `launches`, and `kernels`, the longest
    first: microseconds, calls, name.
    """
    short = shape._replace(outlen=min(shape.outlen, 2 * DECODE_STEPS))
    requests = submit(instance, short, seed=99)
    if shape.kind == "decode":
        while not all(request.tokens["token"] for request in requests):
            tick(instance, requests)
    counted = requests[0].tokens["token"]
    before = len(counted)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        if shape.kind == "decode":
            while len(counted) < before + DECODE_STEPS:
                tick(instance, requests)
        else:
            while not all(request.tokens["token"] for request in requests):
                tick(instance, requests)
        torch.cuda.synchronize()
    num_steps = len(counted) - before
    instance.finish(requests)
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return summarize(spans, num_steps if shape.kind == "decode" else 1)


def summarize(spans: Sequence[Span], num_steps: int) -> dict[str, Any]:
    totals: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        totals[span.name].append(span.end_us - span.begin_us)
    longest = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return {
        "steps": num_steps,
        "busy_us": round(busy_us(spans) / num_steps, 1),
        "launches": round(len(spans) / num_steps, 1),
        "kernels": [
            {"us": round(sum(each) / num_steps, 2), "calls": round(len(each) / num_steps, 2), "name": name[:120]}
            for name, each in longest[:MOST_SHOWN]
        ],
    }


def busy_us(spans: Iterable[Span]) -> float:
    """Length of the union: kernels that overlap count once."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.begin_us):
        total += max(0.0, span.end_us - max(end, span.begin_us))
        end = max(end, span.end_us)
    return total


def text(profiled: dict[str, Any]) -> str:
    lines = [f"  device {profiled['busy_us']} us a step, {profiled['launches']} launches"]
    lines += [f"  {one['us']:>10} us {one['calls']:>7} x {one['name'][:90]}" for one in profiled["kernels"][:12]]
    return "\n".join(lines)
