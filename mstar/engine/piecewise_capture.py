"""Captures the declared regions of nodes at start-up. Loading thread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from mstar.engine.bucket_capture import Progress
from mstar.engine.capture_failure import FAILURES, CaptureError, describe_failure
from mstar.engine.cuda_graph_config import PiecewiseConfig, PiecewisePackedConfig
from mstar.engine.device_graph import GraphMemory
from mstar.engine.engine_config import EngineConfig, auto_capture_sizes
from mstar.engine.node_runtime import NodeRuntime


@torch.inference_mode()
def capture_regions(
    nodes: Sequence[NodeRuntime], config: EngineConfig, memory: GraphMemory, progress: Progress | None = None
) -> int:
    """Capture what the nodes declare at the deployment's sizes; returns how many graphs there are.

    Raises:
        CaptureError: a region failed.
    """
    wanted = [
        (node, region, region_sizes(region.declared, config))
        for node in nodes
        for region in node.submodule.regions.values()
    ]
    total = sum(len(sizes) for _, _, sizes in wanted)
    done = itertools.count()
    for node, region, sizes in wanted:
        name = region.declared.region

        def begin(label: str = f"capture {node.name} {name}") -> None:
            number = next(done)
            if progress is not None:
                progress(label, number, total)

        try:
            region.capture(sizes, memory, config.device, poison=config.debug_poison, begin=begin)
        except FAILURES as error:
            raise CaptureError(describe_failure(f"capture of region {name!r} of {node.name}", error)) from error
    if progress is not None and total:
        progress("capture", total, total)
    return total


def region_sizes(declared: PiecewiseConfig, config: EngineConfig) -> list[int]:
    """Of a declaration in this deployment. On a CPU only those that the deployment names: padding costs more there than
    Python does."""
    if isinstance(declared, PiecewisePackedConfig):
        return [size for size in config.capture_tokens if size <= declared.max_items]
    if config.capture_sizes is None:
        return [] if config.device.type == "cpu" else list(auto_capture_sizes(config))
    return sorted({min(size, config.max_rows) for size in config.capture_sizes if size > 0})
