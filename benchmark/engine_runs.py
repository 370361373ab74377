"""What `benchmark.engine_bench` does with an engine in this process: rows that start together, and running streams that
a prompt joins. The caller's thread ticks the loop; times are its own, host time included."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmark import prefill_interference
from benchmark.local_decode import random_prompts
from benchmark.results import spread
from mstar.bench.report import percentile
from mstar.communication.messages import SamplingParams
from mstar.launch.local import LocalInstance, LocalRequest
from mstar.model.base import PreparedPrompt
from mstar.profile.phases import PHASES, WAITS, PhaseRecorder

STREAMS = prefill_interference.Shape(
    streams=8, stream_prompt=128, stream_tokens=1024, alone_tokens=200, long_prompt=2048, warmup_tokens=32
)
"""Eight streams, and the prompt of 2,048 tokens that joins them."""


class Sampling(NamedTuple):
    """How tokens are drawn; the names are those of the API."""

    temperature: float
    top_p: float = 1.0

    @property
    def how(self) -> str:
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature}, top-p {self.top_p}"


GREEDY = Sampling(0.0)
SAMPLED = Sampling(0.8, 0.95)


class Shape(NamedTuple):
    """One row of the table: `conc` prompts of `inlen` tokens at once, `outlen` tokens to follow each."""

    kind: str
    conc: int
    inlen: int
    outlen: int
    sampling: Sampling = GREEDY

    @property
    def num_outputs(self) -> int:
        return self.conc * self.outlen


class Times(NamedTuple):
    """Seconds of one run: until the first row and until every row has a token, and until the end. `phases_us`: CPU time
    of the loop's stages in the median step; `wait_us`: what it waited for the device."""

    first_s: float
    all_first_s: float
    end_s: float
    phases_us: Mapping[str, float] = {}
    wait_us: float = 0.0


def submit(instance: LocalInstance, shape: Shape, seed: int) -> list[LocalRequest]:
    """All rows; nothing runs yet. `seed` is that of the prompts."""
    prompts = random_prompts(shape.conc, shape.inlen, instance.model.vocab_size(), seed)
    return [
        instance.submit(
            PreparedPrompt(prompt),
            SamplingParams(
                temperature=shape.sampling.temperature,
                top_p=shape.sampling.top_p,
                seed=row,
                max_tokens=shape.outlen,
            ),
        )
        for row, prompt in enumerate(prompts)
    ]


def run(instance: LocalInstance, recorder: PhaseRecorder, shape: Shape, seed: int) -> Times:
    """One run of one shape. Raises `RuntimeError` for a request that failed or ended early."""
    requests = submit(instance, shape, seed)
    recorder.ticks.clear()
    begin = time.perf_counter()
    first = 0.0
    while not all(request.tokens["token"] for request in requests):
        tick(instance, requests)
        if not first and any(request.tokens["token"] for request in requests):
            first = time.perf_counter()
    all_first = time.perf_counter()
    while not (requests[0].finished and all(request.finished for request in requests)):
        instance.tick()
    end = time.perf_counter()
    phases, wait = _phases(recorder)
    counts = {len(request.tokens["token"]) for request in requests}
    instance.finish(requests)
    if counts != {shape.outlen}:
        raise RuntimeError(f"{shape}: rows have {sorted(counts)} tokens")
    return Times(first - begin, all_first - begin, end - begin, phases, wait)


def tick(instance: LocalInstance, requests: Sequence[LocalRequest]) -> None:
    instance.tick()
    failed = [request.failure for request in requests if request.failure is not None]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")


def _phases(recorder: PhaseRecorder) -> tuple[dict[str, float], float]:
    """A wait is not work, though a thread that waits for an accelerator may spin."""
    if not recorder.ticks:
        return {}, 0.0
    phases = {
        name: round(float(np.median([tick.cpu_ns[name] for tick in recorder.ticks])) / 1e3, 1)
        for name in PHASES
        if name not in WAITS
    }
    waits = [sum(tick.wait_ns.values()) + sum(tick.cpu_ns[name] for name in WAITS) for tick in recorder.ticks]
    return phases, round(float(np.median(waits)) / 1e3, 1)


def report(shape: Shape, times: Sequence[Times], via: str = "engine") -> dict[str, Any]:
    """One entry of `rows`: medians, and under `spread` what each is the median of. `itl_ms`: from when every row has a
    token to the end, per token that follows."""
    columns = {
        "out_tok_s": [shape.num_outputs / each.end_s for each in times],
        "itl_ms": [(each.end_s - each.all_first_s) / (shape.outlen - 1) * 1e3 for each in times],
        "ttft_ms": [each.first_s * 1e3 for each in times],
        "last_ttft_ms": [each.all_first_s * 1e3 for each in times],
        "prefill_tok_s": [shape.conc * shape.inlen / each.all_first_s for each in times],
    }
    spreads = {name: spread(values) for name, values in columns.items()}
    middle = sorted(times, key=lambda each: each.end_s)[len(times) // 2]
    row = {
        "kind": shape.kind,
        "via": via,
        "sampling": shape.sampling.how,
        "conc": shape.conc,
        "inlen": shape.inlen,
        "outlen": shape.outlen,
        **{name: of["median"] for name, of in spreads.items()},
        "spread": spreads,
    }
    if middle.phases_us:
        row |= {
            "host_us": dict(middle.phases_us),
            "host_total_us": round(sum(middle.phases_us.values()), 1),
            "wait_us": middle.wait_us,
        }
    return row


def interference(instance: LocalInstance, shape: prefill_interference.Shape, repeats: int) -> dict[str, Any]:
    """Milliseconds between tokens of running streams, alone and from when a prompt arrives until it has its first token
    and they their next; and to that first token."""
    prefill_interference.measure_once(instance, shape, seed=0)
    samples = [prefill_interference.measure_once(instance, shape, seed) for seed in range(1, repeats + 1)]
    found: dict[str, Any] = {"streams": shape.streams, "context": shape.stream_prompt, "prompt": shape.long_prompt}
    found["ttft_ms"] = spread([sample.ttft_s * 1e3 for sample in samples])
    for when in ("alone", "during"):
        gaps = [sorted(getattr(sample, when)) for sample in samples]
        for percent in (50, 99):
            found[f"itl_{when}_ms_p{percent}"] = spread([percentile(each, percent) * 1e3 for each in gaps])
        found[f"gaps_{when}"] = sum(map(len, gaps))
    return found
