"""Decode on a CPU against transformers, same weights, side by side in one run: `python -m benchmark.cpu_peers`.

Ours is the whole engine in this process (scheduler, paged cache, sampler, worker loop); theirs is batched bf16
`generate` with its KV cache. They alternate, so that whatever else the machine does meets both. The last line is JSON:
both sides' rates, and the ratios run by run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Annotated, Any

import torch
import typer

from benchmark.local_decode import LocalDecoder, Rates, open_smollm2, random_prompts
from benchmark.reference_generate import ReferenceGenerate
from benchmark.results import machine, spread, write_result
from mstar.launch.machine import torch_dtype

REQUIRED_RATIO = 1.5


def main(
    rows: Annotated[str, typer.Option(help="Row counts.")] = "1,8,32",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    input_tokens: Annotated[int, typer.Option(min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(min=2)] = 48,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Exit code 1 if decode is below 1.5 times transformers at any width."""
    torch.set_num_threads(threads)
    widths = [int(width) for width in rows.split(",")]
    deployment = open_smollm2(threads, max(widths), input_tokens + output_tokens, [f"dtype={dtype}"])
    checkpoint = deployment.checkpoint()
    if checkpoint is None:
        raise typer.BadParameter("both sides need the same weights, and the checkpoint cannot be fetched")
    ours = LocalDecoder(deployment)
    theirs = ReferenceGenerate(checkpoint, torch_dtype(deployment.config))
    vocab_size = ours.instance.model.vocab_size()
    report: dict[str, Any] = {
        "machine": machine(),
        "weights": checkpoint.spec,
        "dtype": dtype,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "repeats": repeats,
        "rows": {},
    }
    for width in widths:
        prompts = random_prompts(width, input_tokens, vocab_size, seed=width)
        runs: dict[str, list[Rates]] = defaultdict(list)
        ours.run(prompts, 4)
        theirs.run(prompts, 4)
        for repeat in range(repeats):
            sides = [("mstar", ours), ("transformers", theirs)]
            for name, side in sides if repeat % 2 == 0 else reversed(sides):
                runs[name].append(side.run(prompts, output_tokens))
        report["rows"][width] = _compare(runs)
        entry = report["rows"][width]
        print(
            f"{width:>4} rows: decode {entry['mstar']['decode_tok_s']['median']:8.1f} tok/s, transformers "
            f"{entry['transformers']['decode_tok_s']['median']:8.1f}, ratio {entry['decode_ratio']['median']:.2f}; "
            f"prefill ratio {entry['prefill_ratio']['median']:.2f}",
            flush=True,
        )
    ours.close()
    report["decode_ratios"] = {width: entry["decode_ratio"]["median"] for width, entry in report["rows"].items()}
    report["enough"] = all(ratio >= REQUIRED_RATIO for ratio in report["decode_ratios"].values())
    write_result("cpu_peers", report)
    print(json.dumps(report))
    raise typer.Exit(0 if report["enough"] else 1)


def _compare(runs: dict[str, list[Rates]]) -> dict[str, Any]:
    ours, theirs = runs["mstar"], runs["transformers"]
    entry: dict[str, Any] = {
        name: {
            "decode_tok_s": spread([rates.decode_tok_s for rates in side]),
            "prefill_tok_s": spread([rates.prefill_tok_s for rates in side]),
        }
        for name, side in runs.items()
    }
    pairs = list(zip(ours, theirs, strict=True))
    entry["decode_ratio"] = spread([a.decode_tok_s / b.decode_tok_s for a, b in pairs])
    entry["prefill_ratio"] = spread([a.prefill_tok_s / b.prefill_tok_s for a, b in pairs])
    same = [a == b for a, b in zip(ours[0].first_tokens, theirs[0].first_tokens, strict=True)]
    entry["same_first_tokens"] = f"{sum(same)} of {len(same)}"
    return entry


if __name__ == "__main__":
    typer.run(main)
