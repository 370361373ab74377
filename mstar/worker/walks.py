"""A request's walks on this worker: the plan is known, so the worker goes from one to the next alone.

Runs on the worker's loop thread. Each worker of a partition runs the plan for its own nodes; values cross by edges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set

from mstar.communication import host_tensors
from mstar.communication.messages import StartWalk, WalkDone
from mstar.communication.tensor_store import TensorStore
from mstar.engine.request_memory import RequestMemory
from mstar.graph.protocol import GraphError, GraphRuntime, ReadyKey, Routed
from mstar.worker.requests import PartitionRun, Request, RequestTable
from mstar.worker.rid_table import HandleMap, RidTable


class WalkRunner:
    """Enters walks, and says when a partition's part on this worker is over."""

    def __init__(
        self,
        *,
        graph: GraphRuntime,
        store: TensorStore,
        requests: RequestTable,
        memory: RequestMemory,
        rids: RidTable,
        loops: Mapping[ReadyKey, Sequence[str]],
        partition_of: Mapping[str, str],
        input_partitions: Mapping[str, Sequence[str]],
        limits: Mapping[tuple[str, str], Sequence[str]],
        text_keys: Set[ReadyKey],
        split_walks: Set[str],
        rank: int,
    ) -> None:
        """`loops`: enclosing loops of each key, innermost first. `partition_of`: partition of each node.
        `input_partitions`: which partitions of this worker take a request input, by its name. `limits`: names of the
        loop limits that each (partition, walk) has here. `text_keys`: keys that emit text. `split_walks`: walks with
        nodes on other workers."""
        self._graph = graph
        self._store = store
        self._requests = requests
        self._memory = memory
        self._loops = loops
        self._partition_of = partition_of
        self._input_partitions = input_partitions
        self._limits = limits
        self._text_keys = text_keys
        self._split_walks = split_walks
        self._rank = rank
        self._stopping: HandleMap[set[str]] = rids.handle_map("stopped partitions")
        self.done: list[WalkDone] = []
        """Reports to send behind the frames of this tick."""

    def start(self, request: Request, start: StartWalk, routed: Routed) -> None:
        """Enter the first of the walks that the front names, now that those before them have ended. The first partition
        that starts binds the request's inputs for all.

        Raises:
            GraphError: a walk is not one of the partition, or lacks a loop limit; nothing has changed.
        """
        known = request.partitions.get(start.partition)
        limits = {**(request.open.limits if known is None else known.limits), **start.limits}
        for walk in start.walks:
            needed = self._limits.get((start.partition, walk))
            if needed is None:
                raise GraphError(f"partition {start.partition!r} has no walk {walk!r} here")
            if missing := [name for name in needed if name not in limits]:
                raise GraphError(f"walk {walk!r} needs the limits {missing}; the request has {sorted(limits)}")
        if known is not None:
            known.pending.extend(start.walks)
            known.last, known.limits = start.last, limits
            if start.limits:
                self._graph.set_limits(request.handle, start.partition, start.limits)
            self.next_walk(request, start.partition, routed)
            return
        run = request.partitions[start.partition] = PartitionRun(deque(start.walks), start.last, limits)
        if len(request.partitions) == 1:
            self._bind_inputs(request)
        first = run.pending.popleft() if run.pending else None
        self._graph.add(request.handle, start.partition, first, limits, request.open.ranks)

    def _bind_inputs(self, request: Request) -> None:
        for name, value in request.open.inputs.items():
            for partition in self._input_partitions.get(name, ()):
                self._graph.persist(request.handle, partition, name, self._store.put(host_tensors.to_torch(value)))

    def follow(self, routed: Routed) -> None:
        """This worker's part of some walks is over: enter the next of the plan or report, until none ends at once."""
        while routed.walk_done:
            done, routed.walk_done = routed.walk_done, []
            for handle, partition in done:
                self.next_walk(self._requests[handle], partition, routed)
            self._graph.collect(routed)

    def next_walk(self, request: Request, partition: str, routed: Routed) -> None:
        """Enter the next walk; without one left, end the partition's streams and report. A walk that has nothing to run
        here is reported by the runtime's `collect`, like any other end."""
        run = request.partitions[partition]
        if run.pending and not run.finished:
            self._graph.set_walk(request.handle, partition, run.pending.popleft())
            return
        if run.last or run.finished:
            self._graph.end_streams(request.handle, partition, routed)
        if (stopping := self._stopping.get(request.handle)) is not None:
            stopping.discard(partition)
        self.done.append(
            WalkDone(
                rid=request.rid,
                partition=partition,
                rank=self._rank,
                reason=run.reason,
                emits=self._requests.emits(request.handle),
                num_computed_prompt_tokens=self._memory.num_computed_tokens(request.handle, request.num_prompt_tokens),
            )
        )

    def stop(self, request: Request, partition: str) -> None:
        """The front found a stop string: loops around a node that emits text end with the step in flight, or the next.
        What is planned after them still runs, on every worker alike."""
        run = request.partitions.get(partition)
        if run is not None and not run.finished:
            run.reason = "stop"
            if request.handle not in self._stopping:
                self._stopping[request.handle] = set()
            self._stopping[request.handle].add(partition)

    def stop_rows(self, node: str, rows: Sequence[int]) -> None:
        """As `stop`, for rows whose text is over."""
        for row in rows:
            self.stop(self._requests[row], self._partition_of[node])

    def finish_rows(self, key: ReadyKey, rows: Sequence[int]) -> None:
        """The node has said that these rows' partition has produced what was asked.

        Raises:
            GraphError: a walk that would be skipped has nodes on other workers, which may have entered it already and
                would wait for ever.
        """
        partition = self._partition_of[key.node]
        runs = [self._requests[row].partitions[partition] for row in rows]
        if elsewhere := sorted({walk for run in runs for walk in run.pending if walk in self._split_walks}):
            raise GraphError(
                f"it finished partition {partition!r} before {elsewhere}, which have nodes on other workers; end the "
                "loop without `finish`, or place the partition on one worker"
            )
        for run in runs:
            run.finished = True
            run.reason = "stop"

    def stopping(self, key: ReadyKey, rows: Sequence[int]) -> list[int]:
        """Positions in `rows` whose partition the front has stopped."""
        if not len(self._stopping) or key not in self._text_keys:
            return []
        partition = self._partition_of[key.node]
        return [index for index, row in enumerate(rows) if partition in (self._stopping.get(row) or ())]

    def loops_around(self, key: ReadyKey) -> Sequence[str]:
        """Loops that enclose a node in a walk, innermost first."""
        return self._loops[key]
