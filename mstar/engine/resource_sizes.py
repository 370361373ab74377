"""How large the resources of an engine are: pages and state slots, from declarations and what the deployment gives.

Load time; arithmetic only, so that it can be shown before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from mstar.engine.declarations import declared_resources, why_not_on_host
from mstar.engine.engine_config import ENCODER_CACHE_BYTES, EngineConfig
from mstar.engine.resources.logit_adjust import count_row_bytes, table_rows
from mstar.engine.resources.paged_kv import page_bytes
from mstar.engine.resources.recurrent_state_pool import StateDtypes, slot_bytes
from mstar.engine.spec import (
    EncoderCacheSpec,
    NodeResourceSpec,
    PagedKVSpec,
    RecurrentStateSpec,
    ResourceSpec,
    RotarySpec,
    SamplerSpec,
)

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
    """What has a size comes first; of the memory that it leaves, caches and pools have their fractions, and those
    without one share the rest.

    Raises:
        ValueError: more memory is given than there is, or too little for a page or for two slots; or the host takes
            only pages or only states of a cache that has both.
    """
    declared = declared_resources(specs)
    caches = [spec for spec in declared.values() if isinstance(spec, PagedKVSpec)]
    pools = [spec for spec in declared.values() if isinstance(spec, RecurrentStateSpec)]
    sizes = ResourceSizes(
        {
            spec.key: _useful(config.num_pages[spec.key], spec, config)
            for spec in caches
            if spec.key in config.num_pages
        },
        {spec.key: config.num_slots[spec.key] for spec in pools if spec.key in config.num_slots},
        {spec.key: _on_host(spec, "page", config) for spec in caches if config.host_bytes.get(spec.key)},
        {spec.key: _on_host(spec, "slot", config) for spec in pools if config.host_bytes.get(spec.key)},
    )
    if (problem := why_not_on_host(declared, sizes.host_pages.keys() | sizes.host_slots.keys())) is not None:
        raise ValueError(problem)
    rest = _take_fractions(caches, pools, sizes, _left(declared, sizes, config), config)
    if rest is not None:
        rest = int(rest * config.cache_share)
        rest = rest if config.most_cache_bytes is None else min(rest, config.most_cache_bytes)
    caches = [cache for cache in caches if cache.key not in sizes.pages]
    rest = _share_slots([pool for pool in pools if pool.key not in sizes.slots], sizes, rest, bool(caches), config)
    _share_pages(caches, sizes, rest, config)
    return sizes


def state_dtypes(key: str, config: EngineConfig) -> StateDtypes:
    """Of the pool of states with this key."""
    return StateDtypes(config.dtype, config.state_dtypes.get(key, torch.float32))


def device_bytes(spec: ResourceSpec, sizes: ResourceSizes, config: EngineConfig) -> int:
    """What `spec` takes on the device, sinks included; 0 where that is little, or not known yet."""
    match spec:
        case PagedKVSpec(key=key) if key in sizes.pages:
            return (sizes.pages[key] + 1) * item_bytes(spec, config)
        case RecurrentStateSpec(key=key) if key in sizes.slots:
            return (sizes.slots[key] + 1) * item_bytes(spec, config)
        case EncoderCacheSpec(key=key):
            return config.max_bytes.get(key, ENCODER_CACHE_BYTES)
        case RotarySpec():
            return config.max_seq_len * spec.rotary_dim * 4  # cosines and sines of half the dimensions, fp32
        case SamplerSpec(samples_text=True):
            return table_rows(config.max_rows) * count_row_bytes(spec.vocab_size)
        case _:
            return 0


def item_bytes(spec: PagedKVSpec | RecurrentStateSpec, config: EngineConfig) -> int:
    """Of a page of a cache, or a slot of a pool."""
    if isinstance(spec, PagedKVSpec):
        return page_bytes(spec, config.dtype)
    return slot_bytes(spec, state_dtypes(spec.key, config))


def memory_text(num_bytes: int) -> str:
    """`num_bytes` for people: 1.25 GiB."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):,.2f} {unit}"
    return f"{num_bytes} bytes"


def _left(declared: Mapping[str, ResourceSpec], sizes: ResourceSizes, config: EngineConfig) -> int | None:
    """Bytes that what has a size leaves (None: no limit)."""
    if config.resource_bytes is None:
        return None
    taken: Counter[str] = Counter()
    for spec in declared.values():
        taken[_setting(spec)] += device_bytes(spec, sizes, config)
    if config.device.type == "cpu":  # whose memory is the host's
        for key in (*sizes.host_pages, *sizes.host_slots):
            taken[f"resources.{key}.host_bytes"] = config.host_bytes[key]
    total = sum(taken.values())
    if total > config.resource_bytes:
        settings = ", ".join(f"{name} ({memory_text(size)})" for name, size in taken.most_common() if size)
        raise ValueError(
            f"what the configuration asks for takes {memory_text(total)}, and beside the weights there are "
            f"{memory_text(config.resource_bytes)}; lower {settings}"
        )
    return config.resource_bytes - total


def _setting(spec: ResourceSpec) -> str:
    """What the deployment changes to make it smaller."""
    match spec:
        case PagedKVSpec(key=key):
            return f"resources.{key}.num_pages"
        case RecurrentStateSpec(key=key):
            return f"resources.{key}.num_slots"
        case EncoderCacheSpec(key=key):
            return f"resources.{key}.max_bytes"
        case RotarySpec():
            return "max_seq_len"
        case _:
            return "scheduler.max_rows"


def _take_fractions(
    caches: Sequence[PagedKVSpec],
    pools: Sequence[RecurrentStateSpec],
    sizes: ResourceSizes,
    left: int | None,
    config: EngineConfig,
) -> int | None:
    """Size those that have a fraction of `left`; returns what the others share."""
    fractions = {spec.key: config.memory_fractions.get(spec.key, 0.0) for spec in (*caches, *pools)}
    total = sum(fractions.values())
    if left is None or not total:
        return left
    if total > 1 + 1e-9:  # a sum of decimals
        asked = ", ".join(f"resources.{key}.memory_fraction" for key, fraction in fractions.items() if fraction)
        raise ValueError(f"{asked}: {total:g} in all, and there is 1 to share out")
    for spec in (*caches, *pools):
        if not fractions[spec.key]:
            continue
        room = int(left * fractions[spec.key])
        count = room // item_bytes(spec, config) - 1
        if isinstance(spec, PagedKVSpec):
            _require(spec, count, 1, room, config)
            sizes.pages[spec.key] = _useful(count, spec, config)
        else:
            _require(spec, count, LEAST_SLOTS, room, config)
            sizes.slots[spec.key] = count
    return max(0, int(left * (1 - total)))


def _share_slots(
    pools: Sequence[RecurrentStateSpec], sizes: ResourceSizes, rest: int | None, has_caches: bool, config: EngineConfig
) -> int | None:
    """Size the pools that share `rest`, half of it where there are caches too; returns what they leave."""
    most = SLOTS_PER_ROW * config.max_rows
    if rest is None or not pools:
        sizes.slots.update((pool.key, most) for pool in pools)
        return rest
    total = sum(item_bytes(pool, config) for pool in pools)
    share = rest // 2 if has_caches else rest
    count = min(max(share // total - 1, LEAST_SLOTS), most)
    if (count + 1) * total > rest:
        _require(pools[0], rest // total - 1, LEAST_SLOTS, rest, config)
    sizes.slots.update((pool.key, count) for pool in pools)
    return rest - (count + 1) * total


def _share_pages(caches: Sequence[PagedKVSpec], sizes: ResourceSizes, rest: int | None, config: EngineConfig) -> None:
    """Size the caches that share `rest`, in proportion to their pages."""
    total = sum(item_bytes(cache, config) for cache in caches)
    for cache in caches:
        count = _pages_of(config.max_seq_len, cache) * config.max_rows if rest is None else rest // total - 1
        _require(cache, count, 1, rest or 0, config)
        sizes.pages[cache.key] = _useful(count, cache, config)


def _pages_of(num_tokens: int, cache: PagedKVSpec) -> int:
    return -(-num_tokens // cache.page_size)


def _useful(num_pages: int, cache: PagedKVSpec, config: EngineConfig) -> int:
    """Never more than all handles can fill."""
    return min(num_pages, _pages_of(config.max_seq_len, cache) * config.capacity)


def _require(spec: PagedKVSpec | RecurrentStateSpec, count: int, least: int, room: int, config: EngineConfig) -> None:
    """`count` is at least `least`, or the start ends."""
    if count >= least:
        return
    kind, needed = ("pages", "page") if isinstance(spec, PagedKVSpec) else ("slots", "slot")
    raise ValueError(
        f"resources.{spec.key}: {least} of its {kind} and an empty one take "
        f"{memory_text((least + 1) * item_bytes(spec, config))} ({memory_text(item_bytes(spec, config))} a {needed}), "
        f"and {memory_text(room)} are left for it; give other resources less, or this one a size of its own"
    )


def _on_host(spec: PagedKVSpec | RecurrentStateSpec, kind: str, config: EngineConfig) -> int:
    """Pages or slots that the host has room for."""
    given, own_bytes = config.host_bytes[spec.key], item_bytes(spec, config)
    if given < own_bytes:
        raise ValueError(f"resources.{spec.key}.host_bytes: {given} bytes, and a {kind} takes {own_bytes}")
    return given // own_bytes
