"""Which workers take part in what, and what they are told: from a model's declarations and the deployment's placement.

Pure functions of declarations, on the front's loop. A partition's walks are started on every rank that hosts a node of
its planned walks, or of any of its walks where the plan is not known up front, and have ended when each of them says
so; a rank without a node of the walk says so at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mstar.communication.messages import OpenRequest, StartWalk
from mstar.conductor.request_table import PartitionProgress, RequestRecord
from mstar.graph.base import EMIT_TO_CLIENT, GraphEdge, GraphSection, Loop, Parallel, Sequential, nodes_of
from mstar.model.base import Done, Model, PartitionState, PreparedPrompt, WalkStep


class PlacementError(ValueError):
    """A node of the model has no rank."""


class StartPlan(NamedTuple):
    """What a choice starts with: its partitions' first walks by name, and the loop limits of the whole request."""

    partitions: dict[str, PartitionProgress]
    limits: dict[str, int]


class WalkDirectory:
    """`ranks_of_partition`: sorted ranks. `modality_of`: what each emitted signal is, by signal.
    `text_partition`: the partition that emits text (the first one, if none does); its end decides the finish reason."""

    def __init__(self, model: Model, placement: Mapping[str, int]) -> None:
        """Raises `PlacementError` for a node without a rank."""
        walks = model.walks()
        self._model = model
        self.partitions = model.partitions().partitions
        self._ranks_of_walk = {
            walk: _ranks(walks[walk], placement) for partition in self.partitions for walk in partition.walks
        }
        self.ranks_of_partition = {
            partition.name: _union(self._ranks_of_walk[walk] for walk in partition.walks)
            for partition in self.partitions
        }
        self.all_ranks = _union(self.ranks_of_partition.values())
        self.modality_of: dict[str, str] = {}
        partition_of: dict[str, str] = {}
        for partition in self.partitions:
            for walk in partition.walks:
                for edge in _edges(walks[walk]):
                    if edge.next_node == EMIT_TO_CLIENT:
                        self.modality_of[edge.name] = edge.output_modality or ""
                        partition_of.setdefault(edge.output_modality or "", partition.name)
        self.text_partition = partition_of.get("text", self.partitions[0].name)
        self._stream_fed = frozenset(partition.name for partition in self.partitions if partition.stream_fed)
        self._streaming = frozenset(
            end for connection in model.partitions().connections for end in (connection.producer, connection.consumer)
        )

    def plan(self, prompt: PreparedPrompt, max_tokens: int) -> StartPlan:
        """Every partition's first walks, and the loop limits of the whole request. Stream-fed partitions start with no
        walk."""
        plan = self._model.plan_walks(prompt, max_tokens)
        if plan is not None:
            return StartPlan(
                {name: self._progress(name, tuple(walks), asks_model=False) for name, walks in plan.partitions},
                dict(plan.limits),
            )
        partitions: dict[str, PartitionProgress] = {}
        for partition in self.partitions:
            if partition.name in self._stream_fed:
                partitions[partition.name] = self._progress(partition.name, (), asks_model=False)
                continue
            step = self._model.next_walk(partition.name, PartitionState((), prompt.step_metadata))
            if isinstance(step, WalkStep):
                progress = partitions[partition.name] = self._progress(partition.name, (step.walk,), asks_model=True)
                progress.limits = dict(step.limits)
        return StartPlan(partitions, {})

    def _progress(self, partition: str, walks: tuple[str, ...], *, asks_model: bool) -> PartitionProgress:
        ranks = self.ranks_of_partition[partition] if asks_model else self._planned_ranks(partition, walks)
        return PartitionProgress(ranks, asks_model, walks)

    def _planned_ranks(self, partition: str, walks: Sequence[str]) -> tuple[int, ...]:
        """Where these walks, and no others of the partition, run. The end of a stream may be on a rank that none of
        them runs on, and its items are counted all the same."""
        if partition in self._streaming or not walks:
            return self.ranks_of_partition[partition]
        return _union(self._ranks_of_walk[walk] for walk in walks)

    @staticmethod
    def ranks_of(partitions: Mapping[str, PartitionProgress]) -> tuple[int, ...]:
        """Where a request with these partitions is open."""
        return _union(progress.ranks for progress in partitions.values())

    def start(self, record: RequestRecord, opening: OpenRequest | None) -> list[tuple[int, StartWalk]]:
        """The first walks of every partition. `opening` rides with the first message, for a request that lives on one
        worker; None: its workers have it open."""
        messages: list[tuple[int, StartWalk]] = []
        for name, progress in record.partitions.items():
            for rank in progress.ranks:
                first = opening if not messages else None
                messages.append((rank, _start_walk(record.rid, name, progress, first)))
        return messages

    def advance(self, record: RequestRecord, partition: str) -> list[tuple[int, StartWalk]]:
        """The walks of a partition have ended on all ranks: starts the next, or marks the partition done. Workers that
        were not told which walk is the last hear of the end before, where streams depend on it."""
        progress = record.partitions[partition]
        progress.walks_done += progress.walks
        step = self._next_step(record, partition, progress) if progress.asks_model else Done()
        if isinstance(step, WalkStep):
            progress.walks, progress.limits = (step.walk,), dict(step.limits)
        elif progress.asks_model and partition in self._streaming:
            progress.walks, progress.limits, progress.asks_model = (), {}, False
        else:
            progress.is_done = True
            return []
        progress.waiting = set(progress.ranks)
        return [(rank, _start_walk(record.rid, partition, progress, None)) for rank in progress.ranks]

    def _next_step(self, record: RequestRecord, partition: str, progress: PartitionProgress) -> WalkStep | Done:
        """A partition that was stopped has no further walk."""
        if progress.reason == "stop":
            return Done()
        return self._model.next_walk(partition, PartitionState(progress.walks_done, record.step_metadata))


def _start_walk(rid: str, partition: str, progress: PartitionProgress, opened: OpenRequest | None) -> StartWalk:
    return StartWalk(
        rid=rid,
        partition=partition,
        walks=progress.walks,
        last=not progress.asks_model,
        limits=progress.limits,
        open=opened,
    )


def _ranks(section: GraphSection, placement: Mapping[str, int]) -> tuple[int, ...]:
    missing = sorted({node.name for node in nodes_of(section)} - placement.keys())
    if missing:
        raise PlacementError(f"no rank for node {', '.join(missing)}; the placement names {sorted(placement)}")
    return tuple(sorted({placement[node.name] for node in nodes_of(section)}))


def _union(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for group in groups for rank in group}))


def _edges(section: GraphSection) -> list[GraphEdge]:
    """Edges of all nodes, and those that loops take when they end."""
    match section:
        case Loop(section=inner, outputs=outputs):
            return [*_edges(inner), *outputs]
        case Sequential(sections=parts) | Parallel(sections=parts):
            return [edge for part in parts for edge in _edges(part)]
        case _:
            return list(section.outputs)
