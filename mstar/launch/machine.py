"""From configuration words to this machine: dtype, threads, executor and memory. Workers only: imports torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mstar.config.load import ConfigError
from mstar.config.schema import DeploymentConfig
from mstar.engine.engine import EngineConfig
from mstar.platforms import current_platform
from mstar.platforms.executor import DeviceExecutor, InlineExecutor, ThreadedExecutor

CPU_CACHE_BYTES = 4 << 30
CPU_CACHE_SHARE = 0.25
AUTO_STEP_TOKENS = 2048


def torch_device(config: DeploymentConfig) -> torch.device:
    """The device that models run on.

    Raises:
        ConfigError: the configuration asks for one that is not there, or not supported yet.
    """
    wanted = current_platform.device_type() if config.device == "auto" else config.device
    if wanted == "cuda" and current_platform.device_type() != "cuda":
        raise ConfigError("device: cuda was asked for, and torch sees no accelerator; use device: cpu or auto")
    return torch.device("cpu")


def torch_dtype(config: DeploymentConfig) -> torch.dtype:
    """`auto`: bf16 where the processor multiplies it in hardware, else fp32."""
    if config.dtype == "auto":
        return torch.bfloat16 if current_platform.has_bf16("cpu") else torch.float32
    return getattr(torch, config.dtype)


def torch_threads(config: DeploymentConfig) -> int:
    """Threads of one worker: the cores, shared among the workers of this host."""
    if config.num_threads != "auto":
        return config.num_threads
    return max(1, current_platform.num_cores() // config.num_workers)


def device_executor(config: DeploymentConfig) -> tuple[DeviceExecutor, bool]:
    """The executor, and whether the async loop runs on it."""
    if config.scheduler.async_scheduling:
        threads = torch_threads(config)
        return ThreadedExecutor(prepare=lambda: torch.set_num_threads(threads)), True
    return InlineExecutor(), False


def engine_config(config: DeploymentConfig, max_seq_len: int, capacity: int) -> EngineConfig:
    """Sizes of the engine's resources."""
    return EngineConfig(
        device=torch_device(config),
        dtype=torch_dtype(config),
        max_rows=config.scheduler.max_rows,
        max_seq_len=max_seq_len,
        capacity=capacity,
        num_pages=_num_pages(config),
        resource_bytes=_resource_bytes(config),
    )


def step_tokens(config: DeploymentConfig) -> int:
    tokens = config.scheduler.max_step_tokens
    return AUTO_STEP_TOKENS if tokens == "auto" else tokens


def _num_pages(config: DeploymentConfig) -> Mapping[str, int]:
    return {key: tuning.num_pages for key, tuning in config.resources.items() if tuning.num_pages is not None}


def _resource_bytes(config: DeploymentConfig) -> int:
    """Bytes for caches on one worker."""
    free = current_platform.free_memory_bytes("cpu") // config.num_workers
    fractions = [tuning.memory_fraction for tuning in config.resources.values() if tuning.memory_fraction is not None]
    return int(free * fractions[0]) if fractions else int(min(CPU_CACHE_BYTES, free * CPU_CACHE_SHARE))
