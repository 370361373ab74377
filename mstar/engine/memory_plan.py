"""What an engine's resources will take, from declarations alone: shown to the operator before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.communication.messages import PlanRow
from mstar.engine.engine_config import EngineConfig
from mstar.engine.resource_set import cache_pages, declared_resources, host_pages
from mstar.engine.resources.paged_kv import page_bytes
from mstar.engine.spec import NodeResourceSpec, PagedKVSpec, RotarySpec


def plan_memory(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> list[PlanRow]:
    """One row per resource whose size counts; a sampler's columns are left out: a few hundred bytes a request.

    Raises:
        ValueError: as `build_resources`.
    """
    pages, on_host = cache_pages(specs, config), host_pages(specs, config)
    rows: list[PlanRow] = []
    for spec in declared_resources(specs).values():
        match spec:
            case PagedKVSpec(key=key):
                own = pages[key]
                detail = (
                    f"{own} pages of {spec.page_size} tokens = {own * spec.page_size}, "
                    f"{spec.num_layers} layers × {spec.num_kv_heads} heads × {spec.head_dim}"
                )
                own_bytes = page_bytes(spec, config.precision.cache)
                rows.append(PlanRow(key, detail, (own + 1) * own_bytes))
                if key in on_host:
                    rows.append(
                        PlanRow(f"{key}.host", f"{on_host[key]} pages of preempted requests", on_host[key] * own_bytes)
                    )
            case RotarySpec(key=key):
                num_bytes = config.max_seq_len * spec.rotary_dim * 4  # cosines and sines of half the dimensions, fp32
                rows.append(PlanRow(key, f"rotary tables, {config.max_seq_len} positions", num_bytes))
            case _:
                pass
    return rows


def short_caches(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> list[str]:
    """A line for each cache that cannot hold one request of `max_seq_len` tokens. Raises as `plan_memory`."""
    declared, pages = declared_resources(specs), cache_pages(specs, config)
    tokens = {key: own * spec.page_size for key, own in pages.items() if isinstance(spec := declared[key], PagedKVSpec)}
    return [
        f"{key} holds {most} tokens, fewer than max_seq_len ({config.max_seq_len}): no request can be longer than that"
        for key, most in tokens.items()
        if most < config.max_seq_len
    ]
