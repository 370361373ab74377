"""Builds the resources of a worker's nodes from their declarations. Load time, once.

A key that two nodes declare equally names one shared resource. Declarations that do not fit together end start-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstar.engine.engine_config import EngineConfig
from mstar.engine.resources.attention import Attention
from mstar.engine.resources.base import Resource
from mstar.engine.resources.paged_kv import PagedKV, page_bytes
from mstar.engine.resources.positions import Positions
from mstar.engine.resources.sampler import Sampler
from mstar.engine.spec import (
    AttentionSpec,
    NodeResourceSpec,
    PagedKVSpec,
    ResourceSpec,
    RotarySpec,
    SamplerSpec,
)

NodeResources = Mapping[str, Mapping[str, Resource]]
"""By node, by key; caches before what reads them."""


def build_resources(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> NodeResources:
    """Resources of each node.

    Raises:
        ValueError: a key with two meanings, a reference to a key that its node does not declare, or a size without room
            for a page.
    """
    declared = declared_resources(specs)
    num_pages, num_host_pages = cache_pages(specs, config), host_pages(specs, config)
    resources: dict[str, Resource] = {}
    for spec in sorted(declared.values(), key=lambda spec: not isinstance(spec, PagedKVSpec)):
        resources[spec.key] = _build(spec, resources, config, num_pages, num_host_pages)
    return {
        node.node: {
            key: resource for key, resource in resources.items() if key in {spec.key for spec in node.resources}
        }
        for node in specs
    }


def declared_resources(specs: Sequence[NodeResourceSpec]) -> dict[str, ResourceSpec]:
    """Declarations by key. Raises `ValueError` for a key with two meanings or a reference to an undeclared one."""
    declared: dict[str, ResourceSpec] = {}
    for node in specs:
        own = {spec.key for spec in node.resources}
        for spec in node.resources:
            if declared.setdefault(spec.key, spec) != spec:
                raise ValueError(f"resource {spec.key!r} is declared in two ways: {declared[spec.key]} and {spec}")
            if isinstance(spec, AttentionSpec | RotarySpec) and spec.kv_key not in own:
                raise ValueError(
                    f"resource {spec.key!r} of node {node.node!r} refers to {spec.kv_key!r}, not declared there"
                )
    return declared


def cache_pages(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> dict[str, int]:
    """Pages of each cache that requests can own. Raises `ValueError` for a size without room for a page."""
    caches = [spec for spec in declared_resources(specs).values() if isinstance(spec, PagedKVSpec)]
    return {spec.key: _num_pages(spec, caches, config) for spec in caches}


def host_pages(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> dict[str, int]:
    """Pages of each cache that the host has room for. Raises `ValueError` for a size without room for a page."""
    pages: dict[str, int] = {}
    for spec in declared_resources(specs).values():
        if isinstance(spec, PagedKVSpec) and (num_bytes := config.host_bytes.get(spec.key, 0)):
            own_bytes = page_bytes(spec, config.precision.cache)
            pages[spec.key] = num_bytes // own_bytes
            if not pages[spec.key]:
                raise ValueError(f"resources.{spec.key}.host_bytes: {num_bytes} bytes, and a page takes {own_bytes}")
    return pages


def _build(
    spec: ResourceSpec,
    built: Mapping[str, Resource],
    config: EngineConfig,
    num_pages: Mapping[str, int],
    num_host_pages: Mapping[str, int],
) -> Resource:
    match spec:
        case PagedKVSpec():
            return PagedKV(
                spec,
                num_pages=num_pages[spec.key] + 1,
                capacity=config.capacity,
                max_seq_len=config.max_seq_len,
                dtype=config.precision.cache,
                device=config.device,
                poison=config.debug_poison,
                num_host_pages=num_host_pages.get(spec.key, 0),
            )
        case AttentionSpec():
            backend = config.backends.get(spec.key)
            return Attention(spec, _cache(spec.kv_key, built), backend=backend, device=config.device)
        case RotarySpec():
            return Positions(spec, _cache(spec.kv_key, built), max_seq_len=config.max_seq_len, device=config.device)
        case SamplerSpec():
            return Sampler(spec, capacity=config.capacity, max_rows=config.max_rows, device=config.device)


def _cache(key: str, built: Mapping[str, Resource]) -> PagedKV:
    cache = built[key]
    if not isinstance(cache, PagedKV):
        raise ValueError(f"resource {key!r} is used as a paged cache, but is a {type(cache).__name__}")
    return cache


def _num_pages(spec: PagedKVSpec, caches: Sequence[PagedKVSpec], config: EngineConfig) -> int:
    """Pages that requests can own: what the deployment gives, never more than all handles can fill."""
    one_request = -(-config.max_seq_len // spec.page_size)
    own_bytes = page_bytes(spec, config.precision.cache)
    if spec.key in config.num_pages:
        num_pages = config.num_pages[spec.key]
    elif config.resource_bytes is not None:
        sharers = sum(page_bytes(c, config.precision.cache) for c in caches if c.key not in config.num_pages)
        num_pages = config.resource_bytes // sharers - 1
    else:
        num_pages = one_request * config.max_rows
    if num_pages < 1:
        raise ValueError(f"resources.{spec.key}: room for {num_pages} pages of {own_bytes} bytes; give it more memory")
    return min(num_pages, one_request * config.capacity)
