"""What an engine's resources will take, from declarations alone: shown to the operator before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.communication.messages import PlanRow
from mstar.engine.declarations import declared_resources
from mstar.engine.engine_config import ENCODER_CACHE_BYTES, EngineConfig
from mstar.engine.resource_sizes import resource_sizes, state_dtypes
from mstar.engine.resources.paged_kv import page_bytes
from mstar.engine.resources.recurrent_state_pool import slot_bytes
from mstar.engine.spec import EncoderCacheSpec, NodeResourceSpec, PagedKVSpec, RecurrentStateSpec, RotarySpec


def plan_memory(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> list[PlanRow]:
    """One row per resource whose size counts; a sampler's columns are left out: a few hundred bytes a request.

    Raises:
        ValueError: as `build_resources`.
    """
    sizes = resource_sizes(specs, config)
    rows: list[PlanRow] = []
    for spec in declared_resources(specs).values():
        match spec:
            case PagedKVSpec(key=key):
                own = sizes.pages[key]
                detail = (
                    f"{own * spec.page_size:,} tokens in {own:,} pages of {spec.page_size}, "
                    f"{spec.num_layers} layers × {spec.num_kv_heads} heads × {spec.head_dim}"
                )
                own_bytes = page_bytes(spec, config.dtype)
                rows.append(PlanRow(key, detail, (own + 1) * own_bytes))
                if on_host := sizes.host_pages.get(key):
                    rows.append(PlanRow(f"{key}.host", f"{on_host:,} pages of preempted requests", on_host * own_bytes))
            case RecurrentStateSpec(key=key):
                own, own_bytes = sizes.slots[key], slot_bytes(spec, state_dtypes(key, config))
                blocks = ", ".join(f"{block.name} {' × '.join(map(str, block.shape))}" for block in spec.blocks)
                detail = f"{own:,} states and snapshots, {spec.num_layers} layers of {blocks}"
                rows.append(PlanRow(key, detail, (own + 1) * own_bytes))
                if on_host := sizes.host_slots.get(key):
                    detail = f"{on_host:,} states of preempted requests"
                    rows.append(PlanRow(f"{key}.host", detail, on_host * own_bytes))
            case EncoderCacheSpec(key=key):
                detail = "features of images and videos of earlier requests, at most"
                rows.append(PlanRow(key, detail, config.max_bytes.get(key, ENCODER_CACHE_BYTES)))
            case RotarySpec(key=key):
                num_bytes = config.max_seq_len * spec.rotary_dim * 4  # cosines and sines of half the dimensions, fp32
                rows.append(PlanRow(key, f"rotary tables, {config.max_seq_len:,} positions", num_bytes))
            case _:
                pass
    return rows


def short_caches(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> list[str]:
    """A line for each cache that cannot hold one request of `max_seq_len` tokens. Raises as `plan_memory`."""
    declared, pages = declared_resources(specs), resource_sizes(specs, config).pages
    tokens = {key: own * spec.page_size for key, own in pages.items() if isinstance(spec := declared[key], PagedKVSpec)}
    return [
        f"{key} holds {most:,} tokens, fewer than max_seq_len ({config.max_seq_len:,}): no request can be longer"
        for key, most in tokens.items()
        if most < config.max_seq_len
    ]
