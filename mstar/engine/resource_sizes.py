"""How large the resources of an engine are: pages and state slots, from declarations and what the deployment gives.

Load time; arithmetic only, so that it can be shown before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mstar.engine.declarations import declared_resources, why_not_on_host
from mstar.engine.engine_config import EngineConfig
from mstar.engine.resources.paged_kv import page_bytes
from mstar.engine.resources.recurrent_state_pool import StateDtypes, slot_bytes
from mstar.engine.spec import NodeResourceSpec, PagedKVSpec, RecurrentStateSpec

SLOTS_PER_ROW = 3
"""Of a pool without a size of its own, at most: a row's own state, and two snapshots. Beyond, pages are worth more."""
LEAST_SLOTS = 2
"""One request, and a snapshot."""


class ResourceSizes(NamedTuple):
    """By key, without sinks: pages that requests can own, slots that requests and snapshots can own, and what the host
    has room for."""

    pages: dict[str, int]
    slots: dict[str, int]
    host_pages: dict[str, int]
    host_slots: dict[str, int]


def resource_sizes(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> ResourceSizes:
    """Raises `ValueError` for a size without room for a page or a slot, and for a host that takes only pages or only
    states of a cache that has both."""
    declared = declared_resources(specs)
    caches = [spec for spec in declared.values() if isinstance(spec, PagedKVSpec)]
    pools = [spec for spec in declared.values() if isinstance(spec, RecurrentStateSpec)]
    slots, left = _slots(pools, caches, config)
    pages = {spec.key: _num_pages(spec, caches, left, config) for spec in caches}
    host_pages = {
        spec.key: _on_host(spec.key, page_bytes(spec, config.dtype), "page", config)
        for spec in caches
        if config.host_bytes.get(spec.key)
    }
    host_slots = {
        spec.key: _on_host(spec.key, slot_bytes(spec, state_dtypes(spec.key, config)), "slot", config)
        for spec in pools
        if config.host_bytes.get(spec.key)
    }
    if (problem := why_not_on_host(declared, host_pages.keys() | host_slots.keys())) is not None:
        raise ValueError(problem)
    return ResourceSizes(pages, slots, host_pages, host_slots)


def state_dtypes(key: str, config: EngineConfig) -> StateDtypes:
    """Of the pool of states with this key."""
    return StateDtypes(config.dtype, config.state_dtypes.get(key, torch.float32))


def _slots(
    pools: Sequence[RecurrentStateSpec], caches: Sequence[PagedKVSpec], config: EngineConfig
) -> tuple[dict[str, int], int | None]:
    """Slots of each pool, and the bytes that are left for caches without a size of their own (None: no limit)."""
    left = config.resource_bytes
    slots = {pool.key: config.num_slots[pool.key] for pool in pools if pool.key in config.num_slots}
    unsized = [pool for pool in pools if pool.key not in slots]
    most = SLOTS_PER_ROW * config.max_rows
    if left is None or not unsized:
        return slots | {pool.key: most for pool in unsized}, left
    total = sum(slot_bytes(pool, state_dtypes(pool.key, config)) for pool in unsized)
    has_sharers = any(cache.key not in config.num_pages for cache in caches)
    share = left // 2 if has_sharers else left
    count = min(max(share // total - 1, LEAST_SLOTS), most)
    left -= (count + 1) * total
    if left < 0:
        names = ", ".join(f"resources.{pool.key}" for pool in unsized)
        raise ValueError(f"{names}: {LEAST_SLOTS} slots take {(count + 1) * total} bytes; give them more memory")
    return slots | {pool.key: count for pool in unsized}, left


def _num_pages(spec: PagedKVSpec, caches: Sequence[PagedKVSpec], left: int | None, config: EngineConfig) -> int:
    """Pages that requests can own: what the deployment gives, never more than all handles can fill."""
    one_request = -(-config.max_seq_len // spec.page_size)
    own_bytes = page_bytes(spec, config.dtype)
    if spec.key in config.num_pages:
        num_pages = config.num_pages[spec.key]
    elif left is not None:
        sharers = sum(page_bytes(c, config.dtype) for c in caches if c.key not in config.num_pages)
        num_pages = left // sharers - 1
    else:
        num_pages = one_request * config.max_rows
    if num_pages < 1:
        raise ValueError(f"resources.{spec.key}: room for {num_pages} pages of {own_bytes} bytes; give it more memory")
    return min(num_pages, one_request * config.capacity)


def _on_host(key: str, own_bytes: int, kind: str, config: EngineConfig) -> int:
    """Pages or slots that the host has room for."""
    count = config.host_bytes[key] // own_bytes
    if not count:
        raise ValueError(f"resources.{key}.host_bytes: {config.host_bytes[key]} bytes, and a {kind} takes {own_bytes}")
    return count
