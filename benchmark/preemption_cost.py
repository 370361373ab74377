"""What taking a running request's cache away and bringing it back costs: `python -m benchmark.preemption_cost`.

One engine in this process for each way, the real worker loop on the inline executor, so that nothing overlaps: a
request decodes, is preempted between two steps, resumed at once, and decodes on. Its price is the time from the
preemption to its next token less that of a usual decode step; all of it is work, of the loop and of the forward. It is
taken on the wall clock, and as CPU time of the process, in which other load of the machine shows less.

- `recompute`: the pages are released, and all tokens are computed again;
- `cached`: the same with a prefix cache that still has the prompt's full pages;
- `offload`: the pages are copied to a pool of host memory and back.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmark.local_decode import open_smollm2, random_prompts
from benchmark.results import load_average, machine, spread, write_result
from mstar.communication.messages import SamplingParams
from mstar.launch.local import LocalInstance
from mstar.model.base import PreparedPrompt
from mstar.platforms.executor import InlineExecutor

CACHE = "kv"
HOST_BYTES = 1 << 30
WAYS: Mapping[str, tuple[str, ...]] = {
    "recompute": ("prefix_cache.enabled=false",),
    "cached": (),
    "offload": ("prefix_cache.enabled=false", f"resources.{CACHE}.host_bytes={HOST_BYTES}"),
}
"""Way → what the deployment has for it."""
USUAL_STEPS = 8


class Price(NamedTuple):
    """`extra_s`: from the preemption to the next token, less `step_s`, a usual decode step; `cpu_s`: CPU time of the
    process for the same. `num_tokens`: the request's cache then."""

    extra_s: float
    cpu_s: float
    step_s: float
    num_tokens: int


class Span(NamedTuple):
    """Seconds on the wall clock, and CPU time of this process, all threads."""

    wall_s: float
    cpu_s: float

    def until_now(self) -> Span:
        return Span(time.perf_counter() - self.wall_s, time.process_time() - self.cpu_s)


def now() -> Span:
    return Span(time.perf_counter(), time.process_time())


class Preempted:
    """One decoding request of an instance that has no other."""

    def __init__(self, instance: LocalInstance, num_tokens: int, seed: int) -> None:
        self._instance = instance
        (_, self._parts), *_ = instance.workers
        (prompt,) = random_prompts(1, num_tokens, instance.model.vocab_size(), seed)
        self._num_prompt = num_tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=512)
        self._request = instance.submit(PreparedPrompt(prompt), sampling)
        self.decode(2)

    @property
    def tokens(self) -> Sequence[int]:
        """Those generated so far."""
        return self._request.tokens["token"]

    def decode(self, num_tokens: int) -> None:
        target = len(self.tokens) + num_tokens
        while len(self.tokens) < target:
            if self._request.failure is not None or self._request.finished:
                raise RuntimeError(f"the request ended: {self._request.failure or 'too few tokens'}")
            self._instance.tick()

    def price(self, kind: str) -> Price:
        """Preempt and resume once.

        Raises:
            RuntimeError: it could not be, or went another way than `kind`.
        """
        steps: list[Span] = []
        for _ in range(USUAL_STEPS):
            begin = now()
            self.decode(1)
            steps.append(begin.until_now())
        memory = self._parts.engine.memory
        (handle,) = (row for key in self._parts.graph.ready_keys() for row in self._parts.graph.peek(key, 2))
        begin = now()
        went = memory.preempt(handle, CACHE)
        if went != kind or not memory.resume(handle):
            raise RuntimeError(f"the request was to be preempted by {kind} and resumed; it went by {went}")
        self.decode(1)
        taken = begin.until_now()
        step = Span(statistics.median(one.wall_s for one in steps), statistics.median(one.cpu_s for one in steps))
        num_tokens = self._num_prompt + len(self.tokens) - 1
        return Price(taken.wall_s - step.wall_s, taken.cpu_s - step.cpu_s, step.wall_s, num_tokens)

    def leave(self) -> None:
        self._instance.remove(self._request)
        self._instance.tick()  # reads the removal, which the next tick begins with
        while self._instance.tick():
            pass


def measure(
    instances: Mapping[str, LocalInstance], lengths: Sequence[int], repeats: int
) -> dict[int, dict[str, list[Price]]]:
    """By prompt length and way. The ways alternate within a repeat."""
    found: dict[int, dict[str, list[Price]]] = {}
    for length in lengths:
        requests = {way: Preempted(instance, length, seed=length) for way, instance in instances.items()}
        prices: dict[str, list[Price]] = {way: [] for way in instances}
        for _ in range(repeats):
            for way, request in requests.items():
                prices[way].append(request.price("offload" if way == "offload" else "recompute"))
        for request in requests.values():
            request.leave()
        found[length] = prices
    return found


def summarize(found: Mapping[int, Mapping[str, Sequence[Price]]]) -> dict[str, Any]:
    """Milliseconds in all and microseconds per token of the cache, by prompt length and way."""
    return {
        str(length): {
            way: {
                "extra_ms": spread([price.extra_s * 1e3 for price in prices]),
                "cpu_ms": spread([price.cpu_s * 1e3 for price in prices]),
                "us_per_token": spread([price.extra_s / price.num_tokens * 1e6 for price in prices]),
                "decode_step_ms": spread([price.step_s * 1e3 for price in prices]),
            }
            for way, prices in ways.items()
        }
        for length, ways in found.items()
    }


def report_text(report: Mapping[str, Any]) -> str:
    lines = [
        f"{'tokens':>8}"
        + "".join(f"{way + ' ms':>15}{'cpu ms':>9}{'us/token':>10}" for way in WAYS)
        + f"{'decode ms':>12}"
    ]
    for length, ways in report["lengths"].items():
        cells = (
            f"{ways[way]['extra_ms']['median']:>15.2f}{ways[way]['cpu_ms']['median']:>9.2f}"
            f"{ways[way]['us_per_token']['median']:>10.2f}"
            for way in WAYS
        )
        step = statistics.median(ways[way]["decode_step_ms"]["median"] for way in WAYS)
        lines.append(f"{length:>8}" + "".join(cells) + f"{step:>12.2f}")
    return "\n".join(lines)


def main(
    lengths: Annotated[str, typer.Option(help="Prompt tokens.")] = "256,1024,4096",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Preempt and resume at several lengths."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    sizes = [int(length) for length in lengths.split(",")]
    load = load_average()
    instances = {
        way: LocalInstance(open_smollm2(threads, 1, max(sizes) + 600, overrides), executor=InlineExecutor())
        for way, overrides in WAYS.items()
    }
    found = measure(instances, sizes, repeats)
    for instance in instances.values():
        instance.close()
    report = {"machine": machine(), "load_before": load, "repeats": repeats, "lengths": summarize(found)}
    write_result("preemption_cost", report)
    print(json.dumps(report) if as_json else report_text(report))


if __name__ == "__main__":
    typer.run(main)
