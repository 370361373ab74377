"""One rank's worker, from a deployment: nodes with weights, engine, loop. For the worker process and for in-process
runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mstar.communication.arena import Arena, ArenaReader
from mstar.communication.bus import Bus
from mstar.communication.messages import PlanRow, ToWorker
from mstar.config.schema import DeploymentConfig
from mstar.engine.engine_config import EngineConfig
from mstar.engine.memory_plan import plan_memory, short_caches
from mstar.engine.spec import NodeResourceSpec
from mstar.engine.submodule import NodeSubmodule
from mstar.graph.program import CompiledGraph
from mstar.kernels.selection import select_kernels
from mstar.launch.deployment import Deployment
from mstar.launch.machine import (
    WorkerMemory,
    device_executor,
    engine_config,
    step_patches,
    step_tokens,
    torch_device,
    torch_dtype,
    torch_threads,
)
from mstar.model.base import Model
from mstar.model.loader.progress import LoadProgress
from mstar.model.loader.weights import num_parameters
from mstar.model.registry import build_submodule
from mstar.model.submodule_context import SubmoduleContext
from mstar.platforms.executor import DeviceExecutor
from mstar.profile.phases import PhaseClock
from mstar.worker.assemble import Shared, WorkerSettings, assemble_worker
from mstar.worker.grammars.builds import Compiler
from mstar.worker.grammars.trial_messages import TrialSetup
from mstar.worker.grammars.trials import MAX_COMPILE_BYTES, TriedCompiler
from mstar.worker.worker import Worker, WorkerParts

log = logging.getLogger(__name__)

MAX_GRAMMAR_THREADS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker of which instance this is."""

    instance: str
    rank: int = 0
    incarnation: int = 0


def build_rank(
    deployment: Deployment,
    model: Model,
    compiled: CompiledGraph,
    place: Place,
    bus: Bus[ToWorker],
    *,
    progress: LoadProgress | None = None,
    clock: PhaseClock | None = None,
    executor: DeviceExecutor | None = None,
    announce: Callable[[Sequence[PlanRow]], None] = lambda _: None,
) -> tuple[Worker, WorkerParts]:
    """Load the rank's nodes and build its worker. `executor`: another than the configuration's; the loop overlaps if it
    does. `announce` hears the memory plan before anything is allocated. Raises what loading raises."""
    config = deployment.config
    if executor is None:
        executor, overlap = device_executor(config)
    else:
        overlap = executor.overlaps
    settings = _worker_settings(config, place, overlap)
    specs, sizes, weights = _sizes(deployment, model, compiled, settings)
    announce([*weights, *plan_memory(specs, sizes)])
    for line in short_caches(specs, sizes):
        log.warning("%s", line)
    nodes = load_nodes(deployment, compiled, place.rank, progress)
    shared = None
    if config.num_workers > 1:
        shared = Shared(Arena(place.instance, place.rank, place.incarnation), ArenaReader(place.instance))
    return assemble_worker(
        compiled=compiled,
        nodes=nodes,
        specs=specs,
        bus=bus,
        executor=executor,
        engine_config=sizes,
        settings=settings,
        shared=shared,
        clock=clock,
        load_grammars=_grammar_loader(deployment, model),
    )


def _grammar_loader(deployment: Deployment, model: Model) -> Callable[[int], Compiler] | None:
    """What makes the compiler of grammars; None for a model without a tokenizer."""
    directory = deployment.setup.tokenizer_dir
    if directory is None:
        return None
    end_ids = tuple(model.stop_token_ids())
    num_threads = max(1, min(MAX_GRAMMAR_THREADS, torch_threads(deployment.config) // 2))

    def load(vocab_size: int) -> Compiler:
        return TriedCompiler(
            TrialSetup(
                tokenizer_dir=str(directory),
                vocab_size=vocab_size,
                end_ids=end_ids,
                num_threads=num_threads,
                max_bytes=MAX_COMPILE_BYTES,
            )
        )

    return load


def describe_short_caches(deployment: Deployment, model: Model, compiled: CompiledGraph) -> list[str]:
    """A line for each cache of the deployment that is smaller than its longest request, as of the memory that is free
    now. Raises `ValueError` for one without room for a page."""
    lines: list[str] = []
    for rank in range(deployment.config.num_workers):
        settings = _worker_settings(deployment.config, Place("", rank), overlap=False)
        specs, sizes, _ = _sizes(deployment, model, compiled, settings)
        lines += short_caches(specs, sizes)
    return lines


def _worker_settings(config: DeploymentConfig, place: Place, overlap: bool) -> WorkerSettings:
    return WorkerSettings(
        rank=place.rank,
        incarnation=place.incarnation,
        max_rows=config.scheduler.max_rows,
        # Twice what the front takes on: requests that it has let go keep their handles until no step holds them.
        max_waiting=config.scheduler.max_rows + 2 * config.scheduler.max_queue,
        max_step_tokens=step_tokens(config),
        overlap=overlap,
    )


def _sizes(
    deployment: Deployment, model: Model, compiled: CompiledGraph, settings: WorkerSettings
) -> tuple[Sequence[NodeResourceSpec], EngineConfig, Sequence[PlanRow]]:
    """What the rank's nodes declare, the sizes of it, and what the weights will take."""
    local = compiled.nodes_on(settings.rank)
    specs = [spec for spec in model.get_node_resources() if spec.node in local]
    weights = [_weights(deployment, model, compiled.nodes_on(rank)) for rank in range(deployment.config.num_workers)]
    own = weights[settings.rank]
    sizes = engine_config(
        deployment.config,
        specs,
        deployment.setup.max_seq_len,
        settings.capacity,
        compiled.stored_signals(settings.rank),
        WorkerMemory(_num_bytes(own), sum(map(_num_bytes, weights))),
        fingerprint=checkpoint_fingerprint(deployment),
    )
    return specs, sizes, own


def load_nodes(
    deployment: Deployment, compiled: CompiledGraph, rank: int, progress: LoadProgress | None
) -> Mapping[str, NodeSubmodule]:
    """The nodes that live on `rank`, with their weights."""
    device = torch_device(deployment.config)
    if device.type != "cpu":
        select_kernels("torch")  # weights are laid out for the device, and no forward runs on the processor
    context = SubmoduleContext(
        setup=replace(deployment.setup, max_step_patches=step_patches(deployment.config)),
        checkpoint=deployment.checkpoint(),
        dtype=torch_dtype(deployment.config),
        device=device,
        progress=progress,
    )
    return {node: build_submodule(deployment.card, node, context).eval() for node in compiled.nodes_on(rank)}


def _weights(deployment: Deployment, model: Model, nodes: Sequence[str]) -> list[PlanRow]:
    """Of a worker with these nodes."""
    checkpoint = deployment.checkpoint()
    if checkpoint is None or not nodes:
        return []
    dtype = torch_dtype(deployment.config)
    count = num_parameters(checkpoint, lambda name: any(model.reads_weight(node, name) for node in nodes))
    name = str(dtype).removeprefix("torch.")
    detail = f"{count / 1e6:,.1f} M parameters of the checkpoint in {name}, for {', '.join(nodes)}"
    return [PlanRow("weights", detail, count * dtype.itemsize)]


def _num_bytes(rows: Sequence[PlanRow]) -> int:
    return sum(row.num_bytes for row in rows)


def checkpoint_fingerprint(deployment: Deployment) -> str:
    """What names the weights in cache keys; empty for a model without a checkpoint."""
    checkpoint = deployment.checkpoint()
    return "" if checkpoint is None else checkpoint.fingerprint()
