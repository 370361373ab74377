"""Decode and prefill of a whole engine: `python -m benchmark.engine_bench`.

The real worker loop in this process on a loopback bus, random weights, nothing reused; with `--http` then a real server
of the same configuration. Times are the caller's, host time included: output tokens per second over the whole run from
the first tick on, first token included.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmark import device_profile
from benchmark.engine_runs import GREEDY, SAMPLED, STREAMS, Shape, interference, report, run
from benchmark.http_rows import measure, model_server
from benchmark.results import RESULTS, load_average, machine, write_result
from mstar import envs
from mstar.config.load import config_from_mapping
from mstar.launch.deployment import Deployment, resolve_deployment
from mstar.launch.local import LocalInstance
from mstar.launch.machine import torch_device, torch_dtype, torch_threads
from mstar.profile.phases import PhaseRecorder

MODELS = {
    "qwen3_5-0.8b": "benchmark.random_qwen3_5:CARD",
    "qwen3-0.6b": "benchmark.random_qwen3:CARD",
    "smollm2-135m": "benchmark.random_llama:CARD",
    "tiny": "benchmark.random_qwen3_5:TINY",
}
HEAD = "kind     via    tokens    conc   out tok/s    ITL ms   TTFT ms   prefill tok/s   host us   wait us"
DECODE, PREFILL = (128, 256), (2048, 16)
"""Tokens in and out."""


def shapes(
    decode: Sequence[int],
    prefill: Sequence[int] = (),
    sampled: Sequence[int] = (),
    lengths: tuple[tuple[int, int], tuple[int, int]] = (DECODE, PREFILL),
) -> list[Shape]:
    """What is measured, by numbers of rows."""
    short, long = lengths
    return [
        *(Shape("decode", rows, *short) for rows in decode),
        *(Shape("decode", rows, *short, SAMPLED) for rows in sampled),
        *(Shape("prefill", rows, *long) for rows in prefill),
    ]


def sizes(wanted: Sequence[Shape], with_streams: bool) -> list[str]:
    """A configuration that holds all of them at once, and no more."""
    needs = [(each.conc, each.inlen + each.outlen) for each in wanted]
    pages = [rows * -(-tokens // 64) for rows, tokens in needs]
    if with_streams:
        needs += [(STREAMS.streams + 1, max(STREAMS.long_prompt + 64, STREAMS.stream_prompt + STREAMS.stream_tokens))]
        each = -(-(STREAMS.stream_prompt + STREAMS.stream_tokens) // 64)
        pages += [STREAMS.streams * each + STREAMS.long_prompt // 64 + 2]
    return [
        f"scheduler.max_rows={max(rows for rows, _ in needs)}",
        f"max_seq_len={max(4096, *(tokens for _, tokens in needs))}",
        "prefix_cache.enabled=false",
        f"resources.kv.num_pages={1 + max(pages)}",
    ]


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "qwen3_5-0.8b",
    decode: Annotated[str, typer.Option(help="Rows that decode greedily.")] = "1,8,32,64,128",
    prefill: Annotated[str, typer.Option(help="Rows with long prompts.")] = "1,8,32",
    sampled: Annotated[str, typer.Option(help="Rows that decode with temperature 0.8 and top-p 0.95.")] = "",
    http: Annotated[str, typer.Option(help="Rows that decode greedily at a server, after all others.")] = "",
    streams: Annotated[bool, typer.Option("--streams", help="Running streams while a long prompt arrives.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Also what the device spends its time on.")] = False,
    lengths: Annotated[
        str, typer.Option(metavar="IN,OUT,IN,OUT", help="Tokens of rows that decode, and with long prompts.")
    ] = "128,256,2048,16",
    hold: Annotated[
        bool, typer.Option("--hold", help="Once ready, wait for a line on standard input: several start at once.")
    ] = False,
    append: Annotated[bool, typer.Option("--append", help="Add the rows to the file, if it is of this code.")] = False,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    name: Annotated[str, typer.Option(help="Of the result's file.")] = "engine",
    out: Annotated[Path, typer.Option(help="Its folder.")] = RESULTS,
) -> None:
    """Print a table, and write everything to a file."""
    short_in, short_out, long_in, long_out = _numbers(lengths)
    both = (short_in, short_out), (long_in, long_out)
    wanted = shapes(_numbers(decode), _numbers(prefill), _numbers(sampled), both)
    over_http = shapes(_numbers(http), lengths=both)
    settings = [*sizes([*wanted, *over_http], streams), *(overrides or [])]
    config = config_from_mapping({"model": MODELS[model]}, model, settings)
    torch.set_num_threads(torch_threads(config))
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {
        "model": model,
        "hardware": hardware(torch_device(config)),
        "dtype": str(torch_dtype(config)),
        "torch": torch.__version__,
        "commit": machine()["commit"],
        "machine": machine(),
        "settings": settings,
        "repeats": repeats,
        "load_before": load_average(),
        "rows": [],
    }
    deployment = resolve_deployment(config, cache_dir=envs.CACHE_DIR.get())
    if wanted or streams:
        _in_process(deployment, wanted, result, streams=streams, profile=profile, hold=hold)
    if over_http:
        vocab_size = deployment.model().vocab_size()
        with model_server(MODELS[model], settings, vocab_size) as server:
            _ready(f"{model} at {server.url}", hold=hold and not wanted)
            for shape in over_http:
                row = measure(server, shape, vocab_size, repeats)
                row["server"] = [each for each in overrides or () if each.startswith("server.")]
                result["rows"].append(row)
                print(_line(row), flush=True)
    if append:
        result = joined(json.loads((out / f"{name}.json").read_text()), result)
    print(json.dumps({"file": str(write_result(name, result, out))}))


def joined(before: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`before` with the rows of `more`. Raises `ValueError` unless both are of one code on one kind of machine."""
    for key in ("model", "hardware", "torch", "commit", "dtype", "repeats"):
        if before[key] != more[key]:
            raise ValueError(f"{key} of the file is {before[key]}, and of these rows {more[key]}")
    return {**before, "rows": [*before["rows"], *more["rows"]]}


def _in_process(
    deployment: Deployment,
    wanted: Sequence[Shape],
    result: dict[str, Any],
    *,
    streams: bool,
    profile: bool,
    hold: bool,
) -> None:
    """Fill `result`."""
    recorder = PhaseRecorder()
    begin = time.perf_counter()
    instance = LocalInstance(deployment, clock=recorder)
    result["start_s"] = round(time.perf_counter() - begin, 1)
    gc.collect()
    gc.freeze()  # as a worker process does: no collection walks what start-up made
    _ready(f"{result['model']} on {result['hardware']}, {result['start_s']} s to start", hold=hold)
    for shape in wanted:
        run(instance, recorder, shape, seed=0)  # what it needs is there afterwards
        row = report(shape, [run(instance, recorder, shape, seed) for seed in range(1, result["repeats"] + 1)])
        result["rows"].append(row)
        print(_line(row), flush=True)
    if streams:
        result["streams"] = interference(instance, STREAMS, result["repeats"])
        print(json.dumps(result["streams"]), flush=True)
    if profile and torch_device(deployment.config).type == "cuda":
        for shape, row in zip(wanted, result["rows"], strict=True):
            row["device"] = device_profile.profile(instance, shape)
            print(f"{shape.kind} {shape.conc} {shape.sampling.how}\n{device_profile.text(row['device'])}", flush=True)
    instance.close()


def _ready(what: str, *, hold: bool) -> None:
    print(f"ready: {what}", flush=True)
    if hold:
        sys.stdin.readline()
    print(HEAD, flush=True)


def _line(row: Mapping[str, Any]) -> str:
    sampling = "greedy" if row["sampling"] == GREEDY.how else "sampled"
    return (
        f"{row['kind']:<9}{row['via']:<7}{sampling:<8}{row['conc']:>6}{row['out_tok_s']:>12.1f}{row['itl_ms']:>10.3f}"
        f"{row['ttft_ms']:>10.2f}{row['prefill_tok_s']:>16.1f}"
        f"{row.get('host_total_us', ''):>10}{row.get('wait_us', ''):>10}"
        + "".join(f"  {who} {cost} us/token" for who, cost in row.get("cpu_us_per_token", {}).items())
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {machine()['cores']} cores"


if __name__ == "__main__":
    typer.run(main)
