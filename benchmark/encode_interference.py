"""What images do to streams that are running: `python -m benchmark.encode_interference CHECKPOINT`.

Two engines in this process over the same weights, the real worker loop without HTTP, language model and tower on one
worker: one encodes images in steps (`scheduler.max_step_patches: auto`), the other each image in one. In each repeat
some streams run, first alone, then beside requests with images, then beside a text prompt of as many tokens as one of
those, which is cut into chunks; the last says what the chunking bound is here. A time between tokens is the time from
one token of a stream to its next as the caller of the loop sees it: on the wall clock, and in CPU time of this process,
of which less depends on what else the machine does.

The time beside images is divided where their features are complete: `encoding` until then, `prefilling` from then to
their first token. Images are decoded and resized before the clock runs.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from benchmark.local_decode import random_prompts
from benchmark.prefill_interference import Streams
from benchmark.results import load_average, machine, spread, write_result
from mstar import envs
from mstar.bench.images import ImageSize, mosaic
from mstar.bench.report import percentile
from mstar.cli.targets import config_for
from mstar.communication.messages import SamplingParams
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance, LocalRequest
from mstar.model.base import ChatMessage, MediaPart, Model, PreparedPrompt, PromptRequest

MOST_SLOWDOWN = 3.0
"""Goal: p99 between tokens while images are encoded, to that without; the promise for chunks of prompts."""
LEAST_GAIN = 2.0
"""Goal: the same p99 where each image is one step, to that where it is several."""
MODES = ("stepwise", "whole")
PHASES = ("alone", "encoding", "prefilling", "chunking")
UNCUT = 1 << 30
CACHED = 'mstar_encoder_cache_media_total{cache="encoded_media",result="miss"}'


@dataclass(frozen=True, slots=True)
class Shape:
    """`images` requests, each with one image of `size`, arrive at once; `alone_tokens` of each stream are measured
    before they do."""

    size: ImageSize
    images: int = 1
    streams: int = 8
    stream_prompt: int = 64
    stream_tokens: int = 800
    alone_tokens: int = 40
    warmup_tokens: int = 4


class Sample(NamedTuple):
    """One repeat of one mode: seconds between tokens of all streams by phase, and the same in CPU time; how long the
    images' requests took to the last one's first token."""

    gaps: dict[str, list[float]]
    cpu_gaps: dict[str, list[float]]
    ttft_s: float


def image_prompt(model: Model, size: ImageSize, seed: int) -> PreparedPrompt:
    """A chat about an image that nobody has seen."""
    image = MediaPart("image", mosaic(size, random.Random(seed)))
    return model.process_prompt(PromptRequest("chat", (ChatMessage("user", (image, "What is this?")),)))


def num_patches(prompt: PreparedPrompt) -> int:
    return len(prompt.inputs["pixels"])


def measure_once(instance: LocalInstance, shape: Shape, seed: int) -> Sample:
    """One repeat, of prompts that were never seen before."""
    vocab_size = instance.model.vocab_size()
    prompts = [image_prompt(instance.model, shape.size, 1000 * seed + index) for index in range(shape.images)]
    assert prompts[0].token_ids is not None
    text = random_prompts(1, len(prompts[0].token_ids), vocab_size, seed + 1_000_000)
    _, parts = instance.workers[0]
    streams = Streams(
        instance, random_prompts(shape.streams, shape.stream_prompt, vocab_size, seed), shape.stream_tokens
    )
    streams.run(shape.warmup_tokens)
    gaps: dict[str, list[float]] = {}
    cpu_gaps: dict[str, list[float]] = {}

    def take(phase: str) -> None:
        gaps[phase], cpu_gaps[phase] = streams.gaps, streams.cpu_gaps
        streams.gaps, streams.cpu_gaps = [], []

    def submit(prepared: Sequence[PreparedPrompt]) -> list[LocalRequest]:
        return [instance.submit(one, SamplingParams(temperature=0.0, max_tokens=2)) for one in prepared]

    def tick_until(reached: Callable[[], bool], requests: Sequence[LocalRequest]) -> None:
        while not reached():
            if failed := [request.failure for request in requests if request.failure is not None]:
                raise RuntimeError(f"a request failed: {failed[0]}")
            streams.tick()

    streams.cpu_gaps = []
    streams.run(shape.alone_tokens)
    take("alone")
    before = parts.engine.gauges()[CACHED]
    begin = time.perf_counter()
    requests = submit(prompts)
    tick_until(lambda: parts.engine.gauges()[CACHED] >= before + shape.images, requests)
    take("encoding")
    tick_until(lambda: all(one.tokens["token"] for one in requests), requests)
    ttft_s = time.perf_counter() - begin
    take("prefilling")
    streams.run(2)
    streams.gaps, streams.cpu_gaps = [], []
    others = submit([PreparedPrompt(prompt) for prompt in text])
    tick_until(lambda: bool(others[0].tokens["token"]), others)
    streams.tick()  # the step in which a prompt ended shows at the streams' token after it
    take("chunking")
    streams.leave(*requests, *others)
    return Sample(gaps, cpu_gaps, ttft_s)


def compare(instances: Mapping[str, LocalInstance], shape: Shape, repeats: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = defaultdict(list)
    for repeat in range(-1, repeats):
        for mode in MODES if repeat % 2 == 0 else reversed(MODES):
            sample = measure_once(instances[mode], shape, seed=repeat + 1 + 97 * shape.size.width)
            if repeat >= 0:
                samples[mode].append(sample)
    return dict(samples)


def summarize(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Percentiles and ratios repeat by repeat, then their median, least and most."""
    report: dict[str, Any] = {}
    for mode, taken in samples.items():
        entry: dict[str, Any] = {"ttft_ms": spread([one.ttft_s * 1e3 for one in taken])}
        for phase in PHASES:
            if all(one.gaps[phase] for one in taken):
                entry[f"tokens_{phase}"] = spread([float(len(one.gaps[phase])) for one in taken])
                entry[f"itl_{phase}_ms"] = {
                    f"p{percent}": spread([_p(one.gaps[phase], percent) * 1e3 for one in taken]) for percent in (50, 99)
                }
                entry[f"slowdown_{phase}"] = {
                    f"p{percent}": spread(
                        [_p(one.gaps[phase], percent) / _p(one.gaps["alone"], percent) for one in taken]
                    )
                    for percent in (50, 99)
                }
                entry[f"cpu_slowdown_{phase}_p99"] = spread(
                    [_p(one.cpu_gaps[phase], 99) / _p(one.cpu_gaps["alone"], 99) for one in taken]
                )
        report[mode] = entry
    pairs = list(zip(samples["stepwise"], samples["whole"], strict=True))
    report["gain_p99"] = spread([_p(_beside(whole), 99) / _p(_beside(cut), 99) for cut, whole in pairs])
    report["images_to_text_p99"] = spread([_p(_beside(one), 99) / _p(one.gaps["chunking"], 99) for one, _ in pairs])
    report["ttft_stepwise_to_whole"] = spread([cut.ttft_s / whole.ttft_s for cut, whole in pairs])
    slowdown = report["stepwise"]["slowdown_encoding"]["p99"]["median"]
    report["goals"] = {f"p99 while images are encoded <= {MOST_SLOWDOWN} x alone": slowdown <= MOST_SLOWDOWN}
    return report


def report_text(report: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for name, entry in report["images"].items():
        lines.append(f"{name}: {entry['patches']} patches, {entry['prompt_tokens']} prompt tokens")
        lines.append(f"  {'ms between tokens, p50 / p99':<30}" + "".join(f"{phase:>20}" for phase in PHASES))
        for mode in MODES:
            cells = [entry[mode].get(f"itl_{phase}_ms") for phase in PHASES]
            shown = ["-" if c is None else f"{c['p50']['median']:.1f} / {c['p99']['median']:.1f}" for c in cells]
            lines.append(f"  {mode:<30}" + "".join(f"{cell:>20}" for cell in shown))
        slow = entry["stepwise"]["slowdown_encoding"]["p99"]
        lines.append(
            f"  stepwise p99 {slow['median']:.2f} times as long as alone ({slow['min']:.2f} to {slow['max']:.2f}), "
            f"{entry['stepwise']['cpu_slowdown_encoding_p99']['median']:.2f} times in CPU time"
        )
        lines.append(
            f"  whole images take {entry['gain_p99']['median']:.1f} times as long as that; first token "
            f"{entry['ttft_stepwise_to_whole']['median']:.2f} times as late; beside images p99 is "
            f"{entry['images_to_text_p99']['median']:.2f} times that beside a text prompt"
        )
        lines.extend(f"  {'met   ' if met else 'MISSED'} {goal}" for goal, met in entry["goals"].items())
    return "\n".join(lines)


def open_instances(target: str, overrides: Sequence[str], shape: Shape, max_tokens: int) -> dict[str, LocalInstance]:
    """An engine per mode, with caches of `max_tokens`."""
    sizes = [
        f"max_seq_len={max_tokens}",
        f"scheduler.max_rows={shape.streams + shape.images + 1}",
        f"resources.kv.num_pages={(shape.streams + shape.images + 1) * (max_tokens // 64 + 1)}",
        f"resources.state.num_slots={3 * (shape.streams + shape.images + 1)}",
    ]

    def instance(patches: str) -> LocalInstance:
        config = config_for(target, [*sizes, *overrides, f"scheduler.max_step_patches={patches}"])
        return LocalInstance(resolve_deployment(config, cache_dir=envs.CACHE_DIR.get()))

    return {"stepwise": instance("auto"), "whole": instance(str(UNCUT))}


def square(patches: int) -> ImageSize:
    """The size of an image of about so many patches of 16 pixels."""
    side = 32 * round(patches**0.5 / 2)
    return ImageSize(side, side)


def main(
    target: Annotated[str, typer.Argument(help="As for mstar serve: a model with a vision tower.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    patches: Annotated[str, typer.Option(help="Of an image; several numbers, several images.")] = "256,576,1024",
    images: Annotated[int, typer.Option(min=1, help="Requests with an image that arrive at once.")] = 1,
    streams: Annotated[int, typer.Option(min=1, help="Running streams.")] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Exit code 1 if a goal is missed."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    shapes = [Shape(square(int(number)), images, streams) for number in patches.split(",")]
    longest = 1024 + max(int(number) for number in patches.split(",")) // 2
    load = load_average()
    instances = open_instances(target, [f"num_threads={threads}", *(overrides or [])], shapes[0], longest)
    found: dict[str, Any] = {}
    for shape in shapes:
        prompt = image_prompt(instances["whole"].model, shape.size, 0)
        name = f"{shape.size.width}x{shape.size.height}"
        found[name] = {"patches": num_patches(prompt), "prompt_tokens": len(np.asarray(prompt.token_ids))}
        found[name] |= summarize(compare(instances, shape, repeats))
    for instance in instances.values():
        instance.close()
    report = {
        "machine": machine(),
        "load_before": load,
        "load_after": load_average(),
        "target": target,
        "streams": streams,
        "images_at_once": images,
        "repeats": repeats,
        "threads": threads,
        "images": found,
    }
    write_result("encode_interference", report)
    print(json.dumps(report) if as_json else report_text(report))
    raise typer.Exit(0 if all(met for entry in found.values() for met in entry["goals"].values()) else 1)


def _beside(sample: Sample) -> list[float]:
    """From the images' arrival to their first token: a single step may lie on either side of the border."""
    return sample.gaps["encoding"] + sample.gaps["prefilling"]


def _p(gaps: Sequence[float], percent: int) -> float:
    return percentile(sorted(gaps), percent)


if __name__ == "__main__":
    typer.run(main)
