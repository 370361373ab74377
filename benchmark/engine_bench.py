"""Decode and prefill of a whole engine in this process, without HTTP: `python -m benchmark.engine_bench`.

The real worker loop on a loopback bus, random weights, greedy, nothing reused. Times are the caller's, host time
included: output tokens per second over the whole run from the first tick on, first token included.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from benchmark.local_decode import random_prompts
from benchmark.results import machine, spread, write_result
from mstar import envs
from mstar.communication.messages import SamplingParams
from mstar.config.load import config_from_mapping
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance, LocalRequest
from mstar.launch.machine import torch_device, torch_dtype, torch_threads
from mstar.model.base import PreparedPrompt
from mstar.profile.phases import PHASES, WAITS, PhaseRecorder

MODELS = {"qwen3_5-0.8b": "benchmark.random_qwen3_5:CARD", "smollm2-135m": "benchmark.random_llama:CARD"}


class Shape(NamedTuple):
    """One row of the table."""

    kind: str
    conc: int
    inlen: int
    outlen: int


class Times(NamedTuple):
    """Seconds of one run: until the first row and until every row has a token, and until the end. `phases_us`: CPU time
    of the loop's stages in the median step; `wait_us`: what it waited for the device."""

    first_s: float
    all_first_s: float
    end_s: float
    phases_us: dict[str, float]
    wait_us: float


def shapes(decode: Sequence[int], prefill: Sequence[int]) -> list[Shape]:
    """What is measured: prompts of 128 with 256 tokens to follow, and prompts of 2,048 with 16."""
    return [Shape("decode", rows, 128, 256) for rows in decode] + [Shape("prefill", rows, 2048, 16) for rows in prefill]


def run(instance: LocalInstance, recorder: PhaseRecorder, shape: Shape, seed: int) -> Times:
    """All rows at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=shape.outlen)
    prompts = random_prompts(shape.conc, shape.inlen, instance.model.vocab_size(), seed)
    requests = [instance.submit(PreparedPrompt(prompt), sampling) for prompt in prompts]
    recorder.ticks.clear()
    begin = time.perf_counter()
    first = 0.0
    while not all(request.tokens["token"] for request in requests):
        _tick(instance, requests)
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


def _tick(instance: LocalInstance, requests: Sequence[LocalRequest]) -> None:
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


def report(shape: Shape, times: Sequence[Times]) -> dict[str, Any]:
    """One entry of `rows`: medians, with the spread of what the row is about."""
    num_outputs = shape.conc * shape.outlen
    out_tok_s = [num_outputs / each.end_s for each in times]
    prefill_tok_s = [shape.conc * shape.inlen / each.all_first_s for each in times]
    middle = sorted(times, key=lambda each: each.end_s)[len(times) // 2]
    return {
        "kind": shape.kind,
        "conc": shape.conc,
        "inlen": shape.inlen,
        "outlen": shape.outlen,
        "out_tok_s": round(float(np.median(out_tok_s)), 1),
        "itl_ms": round(float(np.median([(t.end_s - t.all_first_s) / (shape.outlen - 1) for t in times])) * 1e3, 3),
        "ttft_ms": round(float(np.median([each.first_s for each in times])) * 1e3, 2),
        "last_ttft_ms": round(float(np.median([each.all_first_s for each in times])) * 1e3, 2),
        "prefill_tok_s": round(float(np.median(prefill_tok_s)), 1),
        "spread": spread(out_tok_s if shape.kind == "decode" else prefill_tok_s),
        "host_us": middle.phases_us,
        "host_total_us": round(sum(middle.phases_us.values()), 1),
        "wait_us": middle.wait_us,
    }


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "qwen3_5-0.8b",
    decode: Annotated[str, typer.Option(help="Rows, with 128 tokens in and 256 out.")] = "1,8,32,64,128",
    prefill: Annotated[str, typer.Option(help="Rows, with 2,048 tokens in and 16 out.")] = "1,8,32",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    name: Annotated[str, typer.Option(help="Of the result's file.")] = "engine",
) -> None:
    """Print a table, and write everything to a file under `benchmark/results`."""
    wanted = shapes(_numbers(decode), _numbers(prefill))
    most = max(shape.conc for shape in wanted)
    sizes = [
        f"scheduler.max_rows={most}",
        "max_seq_len=4096",
        "prefix_cache.enabled=false",
        f"resources.kv.num_pages={1 + max(s.conc * -(-(s.inlen + s.outlen) // 64) for s in wanted)}",
    ]
    config = config_from_mapping({"model": MODELS[model]}, model, [*sizes, *(overrides or [])])
    torch.set_num_threads(torch_threads(config))
    torch.set_grad_enabled(False)
    recorder = PhaseRecorder()
    begin = time.perf_counter()
    instance = LocalInstance(resolve_deployment(config, cache_dir=envs.CACHE_DIR.get()), clock=recorder)
    start_s = time.perf_counter() - begin
    print(f"{model} on {_hardware(torch_device(config))}: ready after {start_s:.1f} s", flush=True)
    print("kind     conc   out tok/s   ITL ms   TTFT ms   prefill tok/s   host us   wait us", flush=True)
    rows: list[dict[str, Any]] = []
    for shape in wanted:
        run(instance, recorder, shape, seed=0)  # what it needs is there afterwards
        row = report(shape, [run(instance, recorder, shape, seed) for seed in range(1, repeats + 1)])
        rows.append(row)
        print(
            f"{row['kind']:<8}{row['conc']:>5}{row['out_tok_s']:>12}{row['itl_ms']:>9}{row['ttft_ms']:>10}"
            f"{row['prefill_tok_s']:>16}{row['host_total_us']:>10}{row['wait_us']:>10}",
            flush=True,
        )
    instance.close()
    where = machine()
    result = {
        "model": model,
        "hardware": _hardware(torch_device(config)),
        "dtype": str(torch_dtype(config)),
        "torch": torch.__version__,
        "commit": where["commit"],
        "machine": where,
        "start_s": round(start_s, 1),
        "repeats": repeats,
        "rows": rows,
    }
    print(json.dumps({"file": str(write_result(name, result))}))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {machine()['cores']} cores"


if __name__ == "__main__":
    typer.run(main)
