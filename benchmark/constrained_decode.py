"""What it costs that texts follow a JSON schema: `python -m benchmark.constrained_decode`.

One engine in this process, the real worker loop as a deployment runs it. The same prompts are decoded for some steps at
temperature 1: with every row free, with every row held to a schema whose text does not end, and with every second one.
The ways alternate within a repeat, so that other work on the machine meets them all; ratios are of medians, on the wall
clock and in CPU time of the process. Compiling the schema is done before.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmark.local_decode import open_target, random_prompts
from benchmark.results import load_average, machine, spread, write_result
from mstar.communication.messages import Grammar, SamplingParams
from mstar.launch.local import LocalInstance, LocalRequest
from mstar.model.base import PreparedPrompt

NUM_PROMPT = 32
SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1},
            "city": {"type": "string", "minLength": 1, "maxLength": 40},
        },
        "required": ["name", "age", "tags", "city"],
    },
}
SHARES: Mapping[str, int] = {"free": 0, "half": 2, "constrained": 1}
"""Way → every how many-th row is constrained."""


class Decoded(NamedTuple):
    """Milliseconds per step."""

    wall_ms: float
    cpu_ms: float


def decode(instance: LocalInstance, rows: int, steps: int, share: int, seed: int) -> Decoded:
    """`steps` steps of `rows` rows, after the prompts and some steps to come into pace."""
    form = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 12}
    grammar = Grammar(format=json.dumps(form))
    prompts = random_prompts(rows, NUM_PROMPT, instance.model.vocab_size(), seed)
    ends = tuple(instance.model.stop_token_ids())
    requests: list[LocalRequest] = []
    for index, prompt in enumerate(prompts):
        held = bool(share) and index % share == 0
        sampling = SamplingParams(
            temperature=1.0,
            seed=seed + index,
            max_tokens=steps + 8,
            stop_token_ids=ends if held else (),
            grammar=grammar if held else None,
        )
        requests.append(instance.submit(PreparedPrompt(prompt), sampling))
    _decode_to(instance, requests, 4)
    wall, cpu = time.perf_counter(), time.process_time()
    _decode_to(instance, requests, 4 + steps)
    taken = Decoded((time.perf_counter() - wall) / steps * 1e3, (time.process_time() - cpu) / steps * 1e3)
    instance.finish(requests)
    return taken


def _decode_to(instance: LocalInstance, requests: Sequence[LocalRequest], num_tokens: int) -> None:
    while not all(len(request.tokens["token"]) >= num_tokens for request in requests):
        instance.tick()
        for request in requests:
            if request.failure is not None:
                raise RuntimeError(request.failure)


def main(
    target: Annotated[str, typer.Argument(help="anything that mstar serve takes")] = "smollm2",
    rows: Annotated[int, typer.Option()] = 32,
    steps: Annotated[int, typer.Option()] = 48,
    repeats: Annotated[int, typer.Option()] = 5,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    instance = LocalInstance(open_target(target, threads, rows, NUM_PROMPT + steps + 8))
    found: dict[str, list[Decoded]] = {way: [] for way in SHARES}
    for share in SHARES.values():
        decode(instance, rows, 2, share, seed=0)
    for repeat in range(repeats):
        for way, share in SHARES.items():
            found[way].append(decode(instance, rows, steps, share, seed=1 + repeat))
    instance.close()
    report: dict[str, Any] = {
        "machine": machine(),
        "load": load_average(),
        "target": target,
        "rows": rows,
        "steps": steps,
        "ways": {
            way: {
                "wall_ms": spread([one.wall_ms for one in steps_of]),
                "cpu_ms": spread([one.cpu_ms for one in steps_of]),
            }
            for way, steps_of in found.items()
        },
    }
    free = {unit: statistics.median(getattr(one, unit) for one in found["free"]) for unit in Decoded._fields}
    for way, steps_of in found.items():
        medians = {unit: statistics.median(getattr(one, unit) for one in steps_of) for unit in Decoded._fields}
        ratios = {unit: medians[unit] / free[unit] for unit in medians}
        report["ways"][way]["ratios"] = ratios
        print(
            f"{way:12} {medians['wall_ms']:8.2f} ms a step ({ratios['wall_ms']:.3f})"
            f"{medians['cpu_ms']:9.2f} ms of CPU ({ratios['cpu_ms']:.3f})"
        )
    write_result("constrained_decode", report)


if __name__ == "__main__":
    typer.run(main)
