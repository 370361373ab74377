"""What an engine's resources will take, from declarations alone: shown to the operator before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.communication.messages import PlanRow
from mstar.engine.declarations import declared_resources
from mstar.engine.engine_config import EngineConfig
from mstar.engine.resource_sizes import device_bytes, item_bytes, resource_sizes
from mstar.engine.spec import (
    EncoderCacheSpec,
    NodeResourceSpec,
    PagedKVSpec,
    RecurrentStateSpec,
    RotarySpec,
    SamplerSpec,
)


def plan_memory(specs: Sequence[NodeResourceSpec], config: EngineConfig) -> list[PlanRow]:
    """One row per resource whose size counts.

    Raises:
        ValueError: as `build_resources`.
    """
    sizes = resource_sizes(specs, config)
    rows: list[PlanRow] = []
    for spec in declared_resources(specs).values():
        num_bytes = device_bytes(spec, sizes, config)
        match spec:
            case PagedKVSpec(key=key):
                own = sizes.pages[key]
                detail = (
                    f"{own * spec.page_size:,} tokens in {own:,} pages of {spec.page_size}, "
                    f"{spec.num_layers} layers × {spec.num_kv_heads} heads × {spec.head_dim}"
                )
                rows.append(PlanRow(key, detail, num_bytes))
                if on_host := sizes.host_pages.get(key):
                    detail = f"{on_host:,} pages of preempted requests"
                    rows.append(PlanRow(f"{key}.host", detail, on_host * item_bytes(spec, config)))
            case RecurrentStateSpec(key=key):
                blocks = ", ".join(f"{block.name} {' × '.join(map(str, block.shape))}" for block in spec.blocks)
                detail = f"{sizes.slots[key]:,} states and snapshots, {spec.num_layers} layers of {blocks}"
                rows.append(PlanRow(key, detail, num_bytes))
                if on_host := sizes.host_slots.get(key):
                    detail = f"{on_host:,} states of preempted requests"
                    rows.append(PlanRow(f"{key}.host", detail, on_host * item_bytes(spec, config)))
            case EncoderCacheSpec(key=key):
                rows.append(PlanRow(key, "features of images and videos of earlier requests, at most", num_bytes))
            case RotarySpec(key=key):
                rows.append(PlanRow(key, f"rotary tables, {config.max_seq_len:,} positions", num_bytes))
            case SamplerSpec(key=key, samples_text=True):
                detail = f"token counts of up to {config.max_rows:,} requests with penalties, at most"
                rows.append(PlanRow(key, detail, num_bytes))
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
