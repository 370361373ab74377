"""Captures the declared regions of nodes at start-up. Loading thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar.engine.bucket_capture import CaptureError, Progress
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
    wanted = [(node, region) for node in nodes for region in node.submodule.regions.values()]
    num_buckets = 0
    for done, (node, region) in enumerate(wanted):
        name = region.declared.region
        if progress is not None:
            progress(f"capture {node.name} {name}", done, len(wanted))
        try:
            region.capture(region_sizes(region.declared, config), memory, config.device, poison=config.debug_poison)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise CaptureError(f"capture of region {name!r} of {node.name} failed: {error}") from error
        num_buckets += len(region.sizes)
    return num_buckets


def region_sizes(declared: PiecewiseConfig, config: EngineConfig) -> list[int]:
    """Of a declaration in this deployment. On a CPU only those that the deployment names: padding costs more there than
    Python does."""
    if isinstance(declared, PiecewisePackedConfig):
        return [size for size in config.capture_tokens if size <= declared.max_items]
    if config.capture_sizes is None:
        return [] if config.device.type == "cpu" else list(auto_capture_sizes(config))
    return [size for size in config.capture_sizes if 0 < size <= config.max_rows]
