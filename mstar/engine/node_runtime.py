"""`NodeRuntime`: one local node with everything a step of it needs. Built once at load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mstar.engine.cuda_graph_runner import GraphRunner
from mstar.engine.engine_config import EngineConfig
from mstar.engine.output_ring import OutputRing
from mstar.engine.resources.base import Resource
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.sampler import Sampler
from mstar.engine.staging import DeviceBlock, LayoutCache, StagingField, StagingRing
from mstar.engine.submodule import NodeSubmodule

HANDLES = "engine.handles"
TOKEN_IDS = "engine.token_ids"
TOKEN_HANDLES = "engine.token_handles"
LAST = "engine.last"
ITERATIONS = "engine.iterations"


def engine_fields(sink: int) -> tuple[StagingField, ...]:
    """What the engine itself stages of every step."""
    return (
        StagingField(HANDLES, "int64", "row", sink),
        StagingField(LAST, "int64", "row", 0),
        StagingField(ITERATIONS, "int64", "row", 0),
        StagingField(TOKEN_IDS, "int64", "token", 0),
        StagingField(TOKEN_HANDLES, "int64", "token", sink),
    )


@dataclass(slots=True)
class NodeRuntime:
    """`cache` and `sampler` are the node's first of their kind: they give `RowColumns` lengths and draws."""

    name: str
    submodule: NodeSubmodule
    resources: Mapping[str, Resource]
    cache: PagedKV | None
    sampler: Sampler | None
    layouts: LayoutCache
    staging: StagingRing
    block: DeviceBlock
    outputs: OutputRing
    graphs: GraphRunner
    stored_signals: frozenset[str]
    asks_can_batch: bool

    def lengths(self, handles: np.ndarray) -> np.ndarray:
        return np.zeros(handles.size, np.int32) if self.cache is None else self.cache.lengths[handles]

    def num_draws(self, handles: np.ndarray) -> np.ndarray:
        return np.zeros(handles.size, np.int32) if self.sampler is None else self.sampler.columns.num_draws[handles]


def build_node(
    name: str, submodule: NodeSubmodule, resources: Mapping[str, Resource], config: EngineConfig
) -> NodeRuntime:
    """The node's runtime; its layers are bound already."""
    fields = [*engine_fields(config.capacity), *(f for r in resources.values() for f in r.staging_fields())]
    return NodeRuntime(
        name=name,
        submodule=submodule,
        resources=resources,
        cache=next((r for r in resources.values() if isinstance(r, PagedKV)), None),
        sampler=next((r for r in resources.values() if isinstance(r, Sampler)), None),
        layouts=LayoutCache(fields),
        staging=StagingRing(config.device),
        block=DeviceBlock(config.device),
        outputs=OutputRing(config.device, poison=config.debug_poison),
        graphs=GraphRunner(),
        stored_signals=config.stored_signals.get(name, frozenset()),
        asks_can_batch=type(submodule).can_batch is not NodeSubmodule.can_batch,
    )
