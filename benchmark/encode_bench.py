"""Time of a vision tower with its blocks captured and launched one by one, on one accelerator.

    python -m benchmark.encode_bench [--size 0.8b] [--repeats 5] [--images 256,1024,4x256,2048,4096] [--json FILE]

The tower of a Qwen3.5 shape with random weights in bf16, images of so many patches (`4x256`: four of them in one step).
Of each: milliseconds of a whole encoding from pixels to features, and of that the host's until the last launch; and of
the blocks alone. Median, least and most of the repeats, each the mean of 10 encodings. Checks nothing; the tests do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmark.results import spread
from mstar.engine.device_graph import GraphMemory
from mstar.engine.engine_config import AUTO_CAPTURE_TOKENS
from mstar.kernels import ops
from mstar.layers.linear import pack_weights
from mstar.model.qwen3_5.checkpoint_sizes import SIZES
from mstar.model.qwen3_5.config import Qwen35Config
from mstar.model.qwen3_5.encode_steps import Grid
from mstar.model.qwen3_5.vision import VisionTower
from mstar.model.qwen3_5.vision_submodule import ALL_BLOCKS, MOST_CAPTURED, VisionSubmodule

DEVICE = torch.device("cuda", 0)
ENCODINGS = 10


def random_node(size: str) -> VisionSubmodule:
    config = Qwen35Config.from_mapping(SIZES[size].config()).vision
    assert config is not None
    tower = VisionTower(config, (0.5,) * 3, (0.5,) * 3, dtype=torch.bfloat16, device=DEVICE)
    for parameter in tower.parameters():
        parameter.normal_(std=0.02)
    pack_weights(tower)
    tower.place_constants(DEVICE)
    return VisionSubmodule(tower, cache_key="encoded", loop="encode", budget=1)


def grids_of(images: str) -> list[Grid]:
    """`4x256`: four nearly square images of about 256 patches."""
    count, _, patches = images.rpartition("x")
    rows = 2 * max(1, round(int(patches) ** 0.5 / 2))
    return [(1, rows, 2 * round(int(patches) / rows / 2))] * int(count or 1)


def blocks(node: VisionSubmodule, x: Tensor, grids: list[Grid]) -> Tensor:
    segments = node.tower.segments(grids)
    assert segments.lengths is not None
    return node.regions[ALL_BLOCKS]({"x": x, "cos": segments.cos, "sin": segments.sin}, segments.lengths)


def time_ms(call: Callable[[], object]) -> tuple[float, float]:
    """Until the device is through, and until the host is."""
    whole: list[float] = []
    host: list[float] = []
    for _ in range(ENCODINGS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - begin)
    return sum(whole) / ENCODINGS * 1e3, sum(host) / ENCODINGS * 1e3


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="0.8b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", default="256,1024,4x256,2048,4096,16x256")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ops.select_kernels("torch")
    node = random_node(arguments.size)
    tower, region = node.tower, node.regions[ALL_BLOCKS]
    values = tower.config.in_channels * tower.config.temporal_patch_size * tower.config.patch_size**2
    sizes = [size for size in AUTO_CAPTURE_TOKENS if size <= MOST_CAPTURED]
    report = []
    for captured in (True, False):
        region.capture(sizes if captured else (), GraphMemory(DEVICE), DEVICE, poison=False)
        for images in arguments.images.split(","):
            grids = grids_of(images)
            patches = sum(height * width for _, height, width in grids)
            pixels = torch.randint(0, 256, (patches, values), dtype=torch.uint8, device=DEVICE)
            x = tower.embed(pixels, grids)

            def encode(pixels: Tensor = pixels, grids: list[Grid] = grids) -> Tensor:
                return tower.merge(blocks(node, tower.embed(pixels, grids), grids))

            def inner(x: Tensor = x, grids: list[Grid] = grids) -> Tensor:
                return blocks(node, x, grids)

            row = {"images": images, "patches": patches, "captured": captured}
            for name, call in (("encode", encode), ("blocks", inner)):
                time_ms(call)
                measured = [time_ms(call) for _ in range(arguments.repeats)]
                row[f"{name}_ms"] = spread([whole for whole, _ in measured])
                row[f"{name}_host_ms"] = spread([host for _, host in measured])
            report.append(row)
            shown = {key: value["median"] if isinstance(value, dict) else value for key, value in row.items()}
            print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
    if arguments.json is not None:
        facts = {"model": f"qwen3_5-{arguments.size}", "hardware": torch.cuda.get_device_name(DEVICE)}
        arguments.json.write_text(json.dumps({**facts, "torch": torch.__version__, "rows": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
