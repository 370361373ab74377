"""Wires one worker from its compiled graph, its nodes and a bus: the composition root of the worker's parts.

Used by the worker process, by in-process runs and by tests; what differs between them is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mstar.communication.arena import Arena, ArenaReader
from mstar.communication.bus import Bus
from mstar.communication.messages import ToWorker
from mstar.communication.tensor_store import TensorStore
from mstar.communication.transport import Transport
from mstar.engine.engine import Engine
from mstar.engine.engine_config import EngineConfig
from mstar.engine.spec import NodeResourceSpec, PagedKVSpec, SamplerSpec
from mstar.engine.submodule import NodeSubmodule
from mstar.graph.program import CompiledGraph
from mstar.graph.runtime import PyGraphRuntime
from mstar.platforms.executor import DeviceExecutor
from mstar.profile.phases import PhaseClock, PhaseTotals
from mstar.worker.admission import Admission
from mstar.worker.chunk_budget import StepLimits
from mstar.worker.grammars.builds import Compiler, GrammarBuilds
from mstar.worker.grammars.constrained_rows import ConstrainedRows
from mstar.worker.heartbeat import StepAge
from mstar.worker.inbox import Inbox
from mstar.worker.micro_scheduler import MicroScheduler
from mstar.worker.outbox import Outbox
from mstar.worker.preemption import Preemption
from mstar.worker.requests import RequestTable
from mstar.worker.rid_table import RidTable
from mstar.worker.step_counters import StepCounters
from mstar.worker.step_end import StepEnd
from mstar.worker.step_log import StepLog
from mstar.worker.teardown import Teardown
from mstar.worker.walks import WalkRunner
from mstar.worker.worker import Worker, WorkerParts


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`max_rows` requests run at once, `max_waiting` more may be known to the worker. `overlap`: the async loop."""

    rank: int = 0
    incarnation: int = 0
    max_rows: int = 256
    max_waiting: int = 1024
    max_step_tokens: int = 2048
    overlap: bool = True

    @property
    def capacity(self) -> int:
        """Handles, the sink row's included."""
        return self.max_rows + self.max_waiting + 1


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared memory towards the other workers; None in an instance of one."""

    arena: Arena
    reader: ArenaReader


def assemble_worker(
    *,
    compiled: CompiledGraph,
    nodes: Mapping[str, NodeSubmodule],
    specs: Sequence[NodeResourceSpec],
    bus: Bus[ToWorker],
    executor: DeviceExecutor,
    engine_config: EngineConfig,
    settings: WorkerSettings,
    shared: Shared | None = None,
    clock: PhaseClock | None = None,
    load_grammars: Callable[[int], Compiler] | None = None,
) -> tuple[Worker, WorkerParts]:
    """A worker that hosts `nodes`, ready to run. The bus is connected by whoever owns it. `load_grammars` makes what
    compiles grammars for a vocabulary of that size, for each thread that waits for it."""
    rank = settings.rank
    store = TensorStore(device=engine_config.device)
    rids = RidTable(settings.capacity - 1, first=1)
    requests = RequestTable(settings.capacity, rids)
    engine_config = replace(engine_config, walk_inputs=_walk_inputs(compiled, rank))
    engine = Engine(nodes, specs, store, executor, engine_config)
    keys = compiled.keys_on(rank)
    policies = {key: engine.policy(key.node, key.walk) for key in keys}
    # What is chunked runs ahead of itself chunk by chunk; a further run of it is not begun before this one has ended.
    chunked = frozenset((key.node, key.walk) for key, policy in policies.items() if policy.chunked)
    graph = PyGraphRuntime(compiled, rank, store, disable_spec_node_walks=chunked)
    preemption = Preemption(memory=engine.memory, graph=graph, requests=requests, rids=rids, max_rows=settings.max_rows)
    admission = Admission(engine, preemption)
    constrained = _constrained_rows(engine, rids, specs, load_grammars)
    transport = Transport(
        rank=rank,
        incarnation=settings.incarnation,
        names=rids,
        store=store,
        bus=bus,
        arena=None if shared is None else shared.arena,
        reader=None if shared is None else shared.reader,
    )
    walks = WalkRunner(
        graph=graph,
        store=store,
        requests=requests,
        memory=engine.memory,
        rids=rids,
        loops={key: compiled.loops_around(key) for key in keys},
        partition_of={
            node.key.node: program.partition for program in compiled.programs.values() for node in program.nodes
        },
        input_partitions=_input_partitions(compiled, rank),
        text_keys={
            node.key
            for program in compiled.programs.values()
            for node in program.nodes
            if any("text" in route.emits for route in node.routes)
        },
        split_walks={walk for (walk, at), program in compiled.programs.items() if at != rank and program.nodes},
        limits={
            (program.partition, walk): [loop.limit for loop in program.loops if loop.max_iters < 0]
            for (walk, at), program in compiled.programs.items()
            if at == rank
        },
        rank=rank,
    )
    outbox = Outbox(
        bus=bus,
        rids=rids,
        requests=requests,
        store=store,
        transport=transport,
        done=walks.done,
        rank=rank,
        capacity=settings.capacity,
    )
    step_log = StepLog(rids, rank)
    inbox = Inbox(
        rids=rids,
        requests=requests,
        admission=admission,
        constrained=constrained,
        preemption=preemption,
        graph=graph,
        store=store,
        transport=transport,
        walks=walks,
        outbox=outbox,
        step_log=step_log,
    )
    teardown = Teardown(rids=rids, requests=requests, admission=admission, graph=graph, store=store, inbox=inbox)
    limits = StepLimits(settings.max_rows, settings.max_step_tokens)

    totals = PhaseTotals()

    def gauges() -> dict[str, float]:
        return {
            **engine.gauges(),
            "mstar_handles": float(len(rids)),
            "mstar_running_rows": float(preemption.num_inside),
            "mstar_queue_depth": float(len(admission)),
            "mstar_held_requests": float(len(preemption.waiting) - preemption.waiting.num_preempted),
            "mstar_preempted_requests": float(preemption.waiting.num_preempted),
            "mstar_tensors": float(store.num_live),
        }

    def sums() -> dict[str, float]:
        return {
            **totals.gauges(),
            'mstar_transport_bytes_total{path="messages"}': float(bus.counters.num_bytes_sent),
            'mstar_transport_bytes_total{path="tensors"}': float(transport.num_bytes_sent),
        }

    parts = WorkerParts(
        bus=bus,
        graph=graph,
        engine=engine,
        inbox=inbox,
        outbox=outbox,
        walks=walks,
        scheduler=MicroScheduler(graph, engine, limits, policies, requests.order),
        step_end=StepEnd(graph, engine, walks, constrained),
        admission=admission,
        constrained=constrained,
        preemption=preemption,
        teardown=teardown,
        counters=StepCounters(gauges, sums, requests.prompt_computed, _caching_nodes(specs)),
        step_log=step_log,
        age=StepAge(),
    )
    return Worker(parts, overlap=settings.overlap, clock=totals if clock is None else clock), parts


def _constrained_rows(
    engine: Engine,
    rids: RidTable,
    specs: Sequence[NodeResourceSpec],
    load: Callable[[int], Compiler] | None,
) -> ConstrainedRows:
    """Grammars are about text: a worker whose nodes draw none leaves them to others. Tokens that a forward computes
    with cannot wait for what is allowed."""
    samplers = [
        resource
        for spec in specs
        for resource in spec.resources
        if isinstance(resource, SamplerSpec) and resource.samples_text
    ]
    if not samplers:
        return ConstrainedRows(engine, rids, None, vocab_size=0)
    vocab_size = max(sampler.vocab_size for sampler in samplers)
    can_wait = not any(sampler.draws_in_forward for sampler in samplers)
    builds = GrammarBuilds(partial(load, vocab_size)) if load is not None and can_wait else None
    return ConstrainedRows(engine, rids, builds, vocab_size)


def _caching_nodes(specs: Sequence[NodeResourceSpec]) -> frozenset[str]:
    return frozenset(
        spec.node for spec in specs if any(isinstance(resource, PagedKVSpec) for resource in spec.resources)
    )


def _walk_inputs(compiled: CompiledGraph, rank: int) -> dict[str, dict[str, frozenset[str]]]:
    """By node of this worker and walk: names of what the graph gives it."""
    inputs: dict[str, dict[str, frozenset[str]]] = {}
    for (_, at), program in compiled.programs.items():
        if at == rank:
            for node in program.nodes:
                names = frozenset(item.name for item in (*node.inputs, *node.streams))
                inputs.setdefault(node.key.node, {})[node.key.walk] = names
    return inputs


def _input_partitions(compiled: CompiledGraph, rank: int) -> dict[str, list[str]]:
    takers: dict[str, list[str]] = {}
    for partition in compiled.partitions:
        if rank in partition.ranks:
            for name in partition.externals:
                takers.setdefault(name, []).append(partition.name)
    return takers
