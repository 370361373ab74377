"""`NodeRuntime`: one local node with everything a step of it needs. Built once at load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mstar.engine.chunk_outputs import KEY as CHUNK_OUTPUTS
from mstar.engine.chunk_outputs import ChunkOutputs
from mstar.engine.cuda_graph_runner import GraphRunner
from mstar.engine.engine_config import EngineConfig
from mstar.engine.output_ring import OutputRing
from mstar.engine.resources.base import Resource
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.sampler import Sampler
from mstar.engine.row_table import RowTable
from mstar.engine.staging import DeviceBlock, LayoutCache, StagingField, StagingRing
from mstar.engine.step_batch import NOT_GIVEN
from mstar.engine.submodule import NodeSubmodule
from mstar.engine.walk_policies import WalkPolicies

HANDLES = "engine.handles"
TOKEN_IDS = "engine.token_ids"
TOKEN_HANDLES = "engine.token_handles"
LAST = "engine.last"
ITERATIONS = "engine.iterations"


def column_field(name: str) -> str:
    """Staging field of one of a node's token columns."""
    return "engine.columns." + name


def engine_fields(sink: int, token_columns: Sequence[str]) -> tuple[StagingField, ...]:
    """What the engine itself stages of every step."""
    return (
        StagingField(HANDLES, "int64", "row", sink),
        StagingField(LAST, "int64", "row", 0),
        StagingField(ITERATIONS, "int64", "row", 0),
        StagingField(TOKEN_IDS, "int64", "token", 0),
        StagingField(TOKEN_HANDLES, "int64", "token", sink),
        *(StagingField(column_field(name), "int64", "token", NOT_GIVEN) for name in token_columns),
    )


@dataclass(slots=True)
class NodeRuntime:
    """`cache` and `sampler` are the node's first of their kind: they give `RowColumns` lengths and draws.
    `chunk_outputs`: of nodes with a walk that accumulates. `drawn` int32 [capacity + 1, draws]: ids drawn for each row,
    of nodes whose caches can be computed again."""

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
    policies: WalkPolicies
    chunk_outputs: ChunkOutputs | None
    drawn: np.ndarray | None

    def lengths(self, handles: np.ndarray) -> np.ndarray:
        return np.zeros(handles.size, np.int32) if self.cache is None else self.cache.lengths[handles]

    def num_draws(self, handles: np.ndarray) -> np.ndarray:
        return np.zeros(handles.size, np.int32) if self.sampler is None else self.sampler.columns.num_draws[handles]

    def restoring(self, handles: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """bool [rows]: rows whose cache lacks tokens that it held before; None: there is no such row."""
        if self.cache is None or self.drawn is None:
            return None
        missing = self.cache.targets[handles] > lengths
        return missing if np.count_nonzero(missing) else None


def build_node(
    name: str,
    submodule: NodeSubmodule,
    resources: Mapping[str, Resource],
    rows: RowTable,
    config: EngineConfig,
) -> NodeRuntime:
    """The node's runtime; its layers are bound already.

    Raises:
        ValueError: a walk's chunking policy asks for what the node does not have.
    """
    walks = list(config.walk_inputs.get(name, ()))
    policies = WalkPolicies(name, submodule, walks, resources.values())
    sampler = next((r for r in resources.values() if isinstance(r, Sampler)), None)
    chunk_outputs = ChunkOutputs() if any(policies.of(walk).accumulate for walk in walks) else None
    if chunk_outputs is not None:
        resources = {**resources, CHUNK_OUTPUTS: chunk_outputs}
    own_fields = engine_fields(config.capacity, submodule.token_columns)
    fields = [*own_fields, *(f for r in resources.values() for f in r.staging_fields())]
    return NodeRuntime(
        name=name,
        submodule=submodule,
        resources=resources,
        cache=next((r for r in resources.values() if isinstance(r, PagedKV)), None),
        sampler=sampler,
        layouts=LayoutCache(fields),
        staging=StagingRing(config.device),
        block=DeviceBlock(config.device),
        outputs=OutputRing(config.device, poison=config.debug_poison),
        graphs=GraphRunner(),
        stored_signals=config.stored_signals.get(name, frozenset()),
        asks_can_batch=type(submodule).can_batch is not NodeSubmodule.can_batch,
        policies=policies,
        chunk_outputs=chunk_outputs,
        drawn=None if sampler is None or policies.recomputable is None else rows.drawn_by(sampler.key),
    )
