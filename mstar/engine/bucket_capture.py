"""Captures the declared walks of a node at start-up: largest bucket first, every row a sink row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.engine import node_runtime as fields
from mstar.engine.capture_failure import FAILURES, CaptureError, describe_failure
from mstar.engine.chunking import MIN_CHUNK
from mstar.engine.cuda_graph_config import (
    BatchedCudaGraphConfig,
    BucketKey,
    CudaGraphConfig,
    PackedCudaGraphConfig,
)
from mstar.engine.cuda_graph_runner import Bucket
from mstar.engine.device_graph import GraphMemory
from mstar.engine.engine_config import EngineConfig, auto_capture_sizes, packed_sizes
from mstar.engine.execution import Portion
from mstar.engine.forward import record_bucket
from mstar.engine.node_hooks import touched_resources
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.staging import DeviceBlock, StepShape, fill_padding
from mstar.engine.step import Rows
from mstar.engine.step_builder import StepBuilder
from mstar.graph.protocol import ReadyKey, TakenRows

Progress = Callable[[str, int, int], None]
"""(label, done, total), before each capture, and once behind the last."""

log = logging.getLogger(__name__)


class Size(NamedTuple):
    """Of a bucket. `tokens`: of packed rows together; None: each row has one, or none."""

    rows: int
    tokens: int | None = None


def capture_buckets(
    nodes: Sequence[NodeRuntime],
    builder: StepBuilder,
    config: EngineConfig,
    memory: GraphMemory,
    progress: Progress | None = None,
) -> int:
    """Capture what the nodes declare at the deployment's sizes; returns how many buckets there are.

    A walk is given up where a backend of its node cannot be captured, and, at sizes that the platform chose, where a
    CPU cannot record it: padding would only cost.
    """
    wanted = [
        (node, declared, size)
        for node in nodes
        for declared in node.submodule.get_cuda_graph_configs()
        for size in capture_sizes(declared, config, node.policies.of(declared.walk).align)
    ]
    wanted.sort(key=lambda item: (-(item[2].tokens or item[2].rows), -item[2].rows))
    given_up: set[tuple[str, CudaGraphConfig]] = set()
    num_buckets = 0
    for done, (node, declared, size) in enumerate(wanted):
        if progress is not None:
            progress(f"capture {node.name} {declared.walk}", done, len(wanted))
        if (node.name, declared) in given_up:
            continue
        bucket = capture_bucket(node, declared, size, builder, config, memory)
        if bucket is None:
            log.info("%s: walk %r runs eagerly, its backends cannot be captured", node.name, declared.walk)
            given_up.add((node.name, declared))
            continue
        chosen_here = config.capture_sizes is None and declared.capture_batch_sizes is None
        if chosen_here and config.device.type == "cpu" and not bucket.graph.is_recorded:
            given_up.add((node.name, declared))
            continue
        node.graphs.add(bucket)
        num_buckets += 1
    if progress is not None and wanted:
        progress("capture", len(wanted), len(wanted))
    return num_buckets


def capture_sizes(declared: CudaGraphConfig, config: EngineConfig, align: int = 1) -> list[Size]:
    """Sizes of a declaration in this deployment. One above its row limit stands for the limit, which is covered so.
    `align`: where chunks of the walk may end. None where the deployment captures nothing."""
    if isinstance(declared, PackedCudaGraphConfig):
        return [Size(*size) for size in packed_sizes(config, max(align, MIN_CHUNK))]
    if config.captures_nothing:
        return []
    sizes = declared.capture_batch_sizes
    if sizes is None:
        sizes = auto_capture_sizes(config) if config.capture_sizes is None else config.capture_sizes
    return [Size(size) for size in sorted({min(size, config.max_rows) for size in sizes}) if size > 0]


@torch.inference_mode()
def capture_bucket(
    node: NodeRuntime,
    declared: CudaGraphConfig,
    size: Size,
    builder: StepBuilder,
    config: EngineConfig,
    memory: GraphMemory | None,
) -> Bucket | None:
    """One bucket, captured. `memory` None: its forward has run once, and nothing is kept. None: no step would replay
    it, since a resource cannot be captured.

    Raises:
        CaptureError: the declaration is of a kind that cannot be captured here, or the node's hooks or forward failed.
    """
    if not isinstance(declared, BatchedCudaGraphConfig | PackedCudaGraphConfig):
        raise CaptureError(f"{node.name}: {type(declared).__name__} of walk {declared.walk!r} cannot be captured here")
    sink = config.capacity
    rows, num_tokens = size
    q_len = 0
    if num_tokens is None:
        q_len = int(_takes_tokens(node, declared, builder, sink))
        num_tokens = rows * q_len
    caches = [resource.streams.max_pages for resource in node.resources.values() if isinstance(resource, PagedKV)]
    layout = node.layouts.layout(StepShape(rows, num_tokens, max(caches, default=0)))
    key = BucketKey(declared.walk, rows, num_tokens, q_len, declared.cg_key_info)
    bucket = Bucket(key, layout, DeviceBlock(config.device), _static_inputs(declared, rows, config.device))
    nobody = Rows(np.empty(0, np.int64), np.empty(0, np.int32))
    step = node.submodule.declare_step(declared.walk, nobody, None)
    touched = [] if step is None else touched_resources(node, step, nobody)
    slot = node.staging.acquire()
    try:
        views = slot.views(layout)
        fill_padding(layout, views, 0, 0)
        views[fields.LAST][:] = np.arange(rows)
        for item in touched:
            item.facts = item.resource.plan(item.step, item.context(views, layout.shape, captured=True))
        if memory is not None and not all(item.resource.capturable(item.facts, item.facts) for item in touched):
            return None
        record_bucket(node, bucket, bucket.block.upload(slot, layout), touched, memory)
    except FAILURES as error:
        done = "warm-up" if memory is None else "capture"
        what = f"{done} of {node.name} {declared.walk!r} at {rows} rows" + (
            f", {num_tokens} tokens" if q_len == 0 and num_tokens else ""
        )
        raise CaptureError(describe_failure(what, error, recorded=memory is not None)) from error
    finally:
        node.staging.release(slot)
    return bucket


def _takes_tokens(node: NodeRuntime, declared: CudaGraphConfig, builder: StepBuilder, sink: int) -> bool:
    """Ask the node about one sink row in the middle of a request."""
    taken = TakenRows(ReadyKey(node.name, declared.walk), [sink], {}, {}, [0], [False])
    built = builder.build(node, (Portion(taken),))
    if built.step is None:
        return False
    if built.step.failed:
        raise CaptureError(f"{node.name} {declared.walk!r}: {built.step.failed[sink]}")
    return built.step.plan.token_ids is not None


def _static_inputs(declared: CudaGraphConfig, size: int, device: torch.device) -> dict[str, Tensor]:
    return {
        item.name: torch.zeros((size, *item.shape), dtype=getattr(torch, item.dtype), device=device)
        for item in declared.static_inputs
    }
