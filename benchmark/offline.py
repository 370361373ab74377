"""Offline throughput in this process, without HTTP: `python -m benchmark.offline`. Requests of one shape, all known at
the start; they enter as the engine has room."""

from __future__ import annotations

import json
import time
from typing import Annotated

import torch
import typer

from benchmark.local_decode import random_prompts
from benchmark.results import machine, write_result
from mstar import envs
from mstar.cli.targets import config_for
from mstar.communication.messages import SamplingParams
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance
from mstar.launch.machine import torch_threads
from mstar.model.base import PreparedPrompt


def main(
    target: Annotated[str, typer.Argument(help="As for mstar serve.")] = "smollm2",
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    requests: Annotated[int, typer.Option(min=1)] = 64,
    input_tokens: Annotated[int, typer.Option(min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(min=1)] = 128,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Tokens per second of a batch of equal requests; every output has its full length."""
    config = config_for(target, overrides or [])
    torch.set_num_threads(torch_threads(config))
    torch.set_grad_enabled(False)
    deployment = resolve_deployment(config, cache_dir=envs.CACHE_DIR.get())
    instance = LocalInstance(deployment)
    prompts = random_prompts(requests, input_tokens, instance.model.vocab_size(), seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens)
    instance.finish([instance.submit(PreparedPrompt(prompts[0]), SamplingParams(temperature=0.0, max_tokens=2))])
    begin = time.perf_counter()
    running = [instance.submit(PreparedPrompt(prompt), sampling) for prompt in prompts]
    instance.finish(running)
    seconds = time.perf_counter() - begin
    num_outputs = sum(len(tokens) for request in running for tokens in request.tokens.values())
    report = {
        "target": target,
        "machine": machine(),
        "requests": requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "seconds": round(seconds, 6),
        "output_tok_s": round(num_outputs / seconds, 1),
        "total_tok_s": round((num_outputs + prompts.size) / seconds, 1),
        "requests_s": round(requests / seconds, 3),
    }
    instance.close()
    file = write_result("offline", report)
    if as_json:
        print(json.dumps(report))
    else:
        print(
            f"{requests} requests of {input_tokens} + {output_tokens} tokens in {seconds:.1f} s: "
            f"{report['output_tok_s']} output tok/s, {report['total_tok_s']} tok/s in all  ({file})"
        )


if __name__ == "__main__":
    typer.run(main)
