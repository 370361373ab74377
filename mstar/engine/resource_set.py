"""Builds the resources of a worker's nodes from their declarations. Load time, once.

A key that two nodes declare equally names one shared resource. Declarations that do not fit together end start-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstar.engine.declarations import declared_resources
from mstar.engine.engine_config import ENCODER_CACHE_BYTES, EngineConfig
from mstar.engine.resource_sizes import ResourceSizes, resource_sizes, state_dtypes
from mstar.engine.resources.attention import Attention
from mstar.engine.resources.base import Resource
from mstar.engine.resources.encoder_cache import EncoderCache
from mstar.engine.resources.linear_attention import LinearAttention
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.positions import Positions
from mstar.engine.resources.recurrent_state_pool import RecurrentStatePool
from mstar.engine.resources.sampler import Sampler
from mstar.engine.spec import (
    AttentionSpec,
    EncoderCacheSpec,
    LinearAttentionSpec,
    NodeResourceSpec,
    PagedKVSpec,
    RecurrentStateSpec,
    ResourceSpec,
    RotarySpec,
    SamplerSpec,
)

NodeResources = Mapping[str, Mapping[str, Resource]]
"""By node, by key; caches before what reads them."""


def build_resources(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> NodeResources:
    """Resources of each node. Raises `ValueError` as `declared_resources` and `resource_sizes`."""
    declared = declared_resources(specs)
    sizes = resource_sizes(specs, config)
    resources: dict[str, Resource] = {}
    for spec in sorted(declared.values(), key=_rank):
        resources[spec.key] = _build(spec, resources, config, sizes)
    return {
        node.node: {
            key: resource for key, resource in resources.items() if key in {spec.key for spec in node.resources}
        }
        for node in specs
    }


def _build(
    spec: ResourceSpec,
    built: Mapping[str, Resource],
    config: EngineConfig,
    sizes: ResourceSizes,
) -> Resource:
    match spec:
        case PagedKVSpec():
            return PagedKV(
                spec,
                num_pages=sizes.pages[spec.key] + 1,
                capacity=config.capacity,
                max_seq_len=config.max_seq_len,
                dtype=config.dtype,
                device=config.device,
                poison=config.debug_poison,
                num_host_pages=sizes.host_pages.get(spec.key, 0),
            )
        case RecurrentStateSpec():
            return RecurrentStatePool(
                spec,
                _cache(spec.kv_key, built),
                num_slots=sizes.slots[spec.key] + 1,
                dtypes=state_dtypes(spec.key, config),
                device=config.device,
                poison=config.debug_poison,
                num_host_slots=sizes.host_slots.get(spec.key, 0),
                snapshot_interval=config.snapshot_interval,
            )
        case AttentionSpec():
            backend = config.backends.get(spec.key)
            return Attention(spec, _cache(spec.kv_key, built), backend=backend, device=config.device)
        case RotarySpec():
            return Positions(spec, _cache(spec.kv_key, built), max_seq_len=config.max_seq_len, device=config.device)
        case LinearAttentionSpec():
            pool = _states(spec.state_key, built)
            backend, dtype = config.backends.get(spec.key), config.dtype
            return LinearAttention(spec, pool, backend=backend, dtype=dtype, device=config.device)
        case EncoderCacheSpec():
            return EncoderCache(
                spec,
                capacity=config.capacity,
                max_bytes=config.max_bytes.get(spec.key, ENCODER_CACHE_BYTES),
                dtype=config.dtype,
                device=config.device,
            )
        case SamplerSpec():
            return Sampler(spec, capacity=config.capacity, max_rows=config.max_rows, device=config.device)


def _cache(key: str, built: Mapping[str, Resource]) -> PagedKV:
    cache = built[key]
    if not isinstance(cache, PagedKV):
        raise ValueError(f"resource {key!r} is used as a paged cache, but is a {type(cache).__name__}")
    return cache


def _states(key: str, built: Mapping[str, Resource]) -> RecurrentStatePool:
    pool = built[key]
    if not isinstance(pool, RecurrentStatePool):
        raise ValueError(f"resource {key!r} is used as a pool of states, but is a {type(pool).__name__}")
    return pool


def _rank(spec: ResourceSpec) -> int:
    """Resources are built, and touched in a step, behind those that they read."""
    return 0 if isinstance(spec, PagedKVSpec) else 1 if isinstance(spec, RecurrentStateSpec) else 2
