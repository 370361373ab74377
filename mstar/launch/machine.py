"""From configuration words to this machine: dtype, threads, executor and memory. Workers only: imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mstar.config.load import ConfigError
from mstar.config.schema import DeploymentConfig
from mstar.engine.cuda_executor import CudaExecutor
from mstar.engine.engine_config import AUTO_CAPTURE_TOKENS, EngineConfig
from mstar.engine.resource_sizes import memory_text
from mstar.engine.spec import NodeResourceSpec, PagedKVSpec, RecurrentStateSpec
from mstar.model.base import AUTO_STEP_PATCHES
from mstar.platforms import current_platform
from mstar.platforms.executor import DeviceExecutor, InlineExecutor, ThreadedExecutor
from mstar.platforms.platform import DeviceType

CPU_CACHE_BYTES = 4 << 30
CPU_CACHE_SHARE = 0.25
DEVICE_CACHE_SHARE = 0.8
"""Of what the weights, and resources with a size, will leave. The rest is for activations, captured graphs and the
scratch memory of kernels."""
AUTO_STEP_TOKENS = 2048
AUTO_DEVICE_STEP_TOKENS = 8192
AUTO_DEVICE_STEP_PATCHES = 131_072
"""All blocks of a small tower over 2048 patches of one image, or 4096 of several."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What weights take: those of one worker, and those of all workers of the host."""

    weight_bytes: int
    all_weight_bytes: int


def torch_device(config: DeploymentConfig) -> torch.device:
    """`auto`: the accelerator, where torch sees one. All workers of a host share one.

    Raises:
        ConfigError: `cuda`, and torch sees no accelerator.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if current_platform.device_type() == "cuda":
        return torch.device("cuda", 0)
    if config.device == "cuda":
        raise ConfigError("device: cuda, and torch finds no accelerator; install a build of torch for it, or use cpu")
    return torch.device("cpu")


def torch_dtype(config: DeploymentConfig) -> torch.dtype:
    """`auto`: bf16 where the device multiplies it in hardware, else fp32."""
    if config.dtype == "auto":
        return torch.bfloat16 if current_platform.has_bf16(_device_type(config)) else torch.float32
    return getattr(torch, config.dtype)


def torch_threads(config: DeploymentConfig) -> int:
    """Threads of one worker: the cores, shared among the workers of this host."""
    if config.num_threads != "auto":
        return config.num_threads
    return max(1, current_platform.num_cores() // config.num_workers)


def device_executor(config: DeploymentConfig) -> tuple[DeviceExecutor, bool]:
    """The executor, and whether the async loop runs on it."""
    if torch_device(config).type == "cuda":
        return CudaExecutor(), config.scheduler.async_scheduling
    if config.scheduler.async_scheduling:
        threads = torch_threads(config)
        return ThreadedExecutor(prepare=lambda: torch.set_num_threads(threads)), True
    return InlineExecutor(), False


def engine_config(
    config: DeploymentConfig,
    specs: Sequence[NodeResourceSpec],
    max_seq_len: int,
    capacity: int,
    stored_signals: Mapping[str, frozenset[str]],
    memory: WorkerMemory,
    fingerprint: str,
) -> EngineConfig:
    """Sizes of the engine's resources on one worker, which hosts the nodes of `specs` and is about to load their
    weights, which `fingerprint` names.

    Raises:
        ConfigError: the weights do not fit.
    """
    declared = [resource for spec in specs for resource in spec.resources]
    caches = {resource.key for resource in declared if isinstance(resource, PagedKVSpec)}
    states = {resource.key for resource in declared if isinstance(resource, RecurrentStateSpec)}
    tuned = {key: tuning for key, tuning in config.resources.items() if key in caches | states}
    pages = {key: tuning.num_pages for key, tuning in tuned.items() if tuning.num_pages is not None}
    slots = {key: tuning.num_slots for key, tuning in tuned.items() if tuning.num_slots is not None}
    on_cpu = _device_type(config) == "cpu"
    return EngineConfig(
        device=torch_device(config),
        dtype=torch_dtype(config),
        max_rows=config.scheduler.max_rows,
        max_seq_len=max_seq_len,
        capacity=capacity,
        num_pages=pages,
        num_slots=slots,
        state_dtypes={key: getattr(torch, tuning.dtype) for key, tuning in tuned.items() if tuning.dtype is not None},
        resource_bytes=_resource_bytes(config, memory),
        memory_fractions={key: t.memory_fraction for key, t in tuned.items() if t.memory_fraction is not None},
        cache_share=CPU_CACHE_SHARE if on_cpu else DEVICE_CACHE_SHARE,
        most_cache_bytes=CPU_CACHE_BYTES if on_cpu else None,
        backends={key: t.backend for key, t in config.resources.items() if t.backend is not None},
        capture_sizes=_capture_sizes(config),
        capture_tokens=_capture_tokens(config),
        stored_signals=stored_signals,
        prefix_cache=config.prefix_cache.enabled,
        reuse_generated=config.prefix_cache.reuse_generated,
        snapshot_interval=config.prefix_cache.snapshot_interval,
        host_bytes={key: tuning.host_bytes for key, tuning in tuned.items() if tuning.host_bytes},
        max_bytes={key: t.max_bytes for key, t in config.resources.items() if t.max_bytes is not None},
        fingerprint=fingerprint,
    )


def step_tokens(config: DeploymentConfig) -> int:
    tokens = config.scheduler.max_step_tokens
    if tokens != "auto":
        return tokens
    return AUTO_STEP_TOKENS if torch_device(config).type == "cpu" else AUTO_DEVICE_STEP_TOKENS


def step_patches(config: DeploymentConfig) -> int:
    """Of the worker. The other processes count with less: a loop of more steps, which the worker ends early."""
    patches = config.scheduler.max_step_patches
    if patches != "auto":
        return patches
    return AUTO_STEP_PATCHES if torch_device(config).type == "cpu" else AUTO_DEVICE_STEP_PATCHES


def _capture_sizes(config: DeploymentConfig) -> tuple[int, ...] | None:
    """None: the engine's choice for the platform."""
    if not config.capture.enabled:
        return ()
    sizes = config.capture.batch_sizes
    return None if sizes == "auto" else tuple(sorted(sizes))


def _capture_tokens(config: DeploymentConfig) -> tuple[int, ...]:
    """Up to the longest step, as far as launching counts. On a CPU, where it costs next to nothing, none."""
    if not config.capture.enabled or torch_device(config).type == "cpu":
        return ()
    most = step_tokens(config)
    return tuple(sorted({min(tokens, most) for tokens in AUTO_CAPTURE_TOKENS}))


def _resource_bytes(config: DeploymentConfig, memory: WorkerMemory) -> int:
    """What a worker has for its resources: an equal part of what the weights of all workers leave of the device, and no
    more than its own leave of what is free. The first does not depend on which of the others have started."""
    device = _device_type(config)
    free = current_platform.free_memory_bytes(device)
    left = free - memory.weight_bytes
    if config.num_workers > 1:
        total = current_platform.total_memory_bytes(device)
        left = min(left, (total - memory.all_weight_bytes) // config.num_workers)
        if memory.all_weight_bytes >= total:
            raise ConfigError(
                f"the weights of the {config.num_workers} workers, which share a device, take "
                f"{memory_text(memory.all_weight_bytes)}, and it has {memory_text(total)}; use a smaller checkpoint"
            )
    if left <= 0:
        raise ConfigError(
            f"the weights take {memory_text(memory.weight_bytes)}, and {memory_text(free)} of memory are free; end "
            f"what else uses it, or use a smaller checkpoint"
        )
    return left


def _device_type(config: DeploymentConfig) -> DeviceType:
    return "cpu" if torch_device(config).type == "cpu" else "cuda"
