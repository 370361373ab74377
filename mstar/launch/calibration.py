"""How long steps take on this machine, measured before the first request. Workers only: imports torch.

For `scheduler.max_step_tokens: auto` on a CPU, where the time of a step follows its tokens closely. On an accelerator
the same steps run for what a first run costs: kernels are compiled and chosen before a request waits for them. A node
whose prompts must come with inputs from other nodes cannot be run alone; its steps are bounded by tokens.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from mstar.config.schema import DeploymentConfig
from mstar.engine.step_cost import StepCost
from mstar.engine.step_timing import DECODE_ROWS, DecodeWalk, measure_step_cost
from mstar.graph.program import CompiledGraph, NodeProgram
from mstar.graph.protocol import ReadyKey
from mstar.launch.machine import torch_device
from mstar.worker.chunk_budget import ChunkBudget
from mstar.worker.worker import WorkerParts

log = logging.getLogger(__name__)


def calibrate_steps(config: DeploymentConfig, compiled: CompiledGraph, rank: int, parts: WorkerParts) -> None:
    """Measure the nodes of `rank` that can be, tell the scheduler, and log what it makes of it. Nothing runs yet."""
    if torch_device(config).type != "cpu":
        for chunks, decode in _measurable(compiled, rank, parts):
            measure_step_cost(parts.engine, chunks, decode)
        return
    if config.scheduler.max_step_tokens != "auto":
        return
    engine, limits = parts.engine, parts.scheduler.limits
    costs: dict[str, StepCost] = {}
    for chunks, decode in _measurable(compiled, rank, parts):
        cost = measure_step_cost(engine, chunks, decode)
        if cost is not None:
            costs[chunks.node] = cost
            log.info("%s", describe_cost(chunks.node, cost, limits.max_step_tokens))
    parts.scheduler.limits = replace(limits, costs=costs)


def describe_cost(node: str, cost: StepCost, most: int) -> str:
    """One line about a node's steps. `most`: tokens of any step."""
    rows = DECODE_ROWS
    alone = ChunkBudget(most, cost, 0, 0, 0).cut(0, most, 1)
    beside = ChunkBudget(most, cost, rows, rows, 0).cut(0, most, 1)
    far = f", {1e3 * 1024 * cost.pair_s:.3g} ms more for each 1,024 before it" if cost.pair_s else ""
    if cost.context_s:
        far += f", and {1e3 * 1024 * cost.context_s:.3g} ms for each 1,024 before a chunk"
    return (
        f"{node}: {rows} streams decode in {1e3 * cost.decode_s(rows, 0):.3g} ms; a step with prompts takes "
        f"{1e3 * cost.base_s:.3g} ms and {1e3 * cost.token_s:.3g} ms for each token{far}; it computes "
        f"{alone} prompt tokens, {beside} beside {rows} streams"
    )


def _measurable(compiled: CompiledGraph, rank: int, parts: WorkerParts) -> list[tuple[ReadyKey, DecodeWalk | None]]:
    """Chunked walks that run without graph inputs, one per node, each with a walk that may share its steps and goes on
    from its own values alone."""
    walks = [program for (_, at), program in compiled.programs.items() if at == rank]
    programs = [node for program in walks for node in program.nodes]
    optional = {(program.walk, e.position) for program in walks for e in program.externals if e.optional}
    found: dict[str, tuple[ReadyKey, DecodeWalk | None]] = {}
    for chunks in programs:
        key = chunks.key
        waits = any((key.walk, position) not in optional for each in chunks.inputs for position in each.positions)
        if not parts.engine.policy(key.node, key.walk).chunked or waits or chunks.streams:
            continue
        decode = next((walk for node in programs if (walk := _decode_walk(node, key, parts)) is not None), None)
        found.setdefault(key.node, (key, decode))
    return list(found.values())


def _decode_walk(node: NodeProgram, chunks: ReadyKey, parts: WorkerParts) -> DecodeWalk | None:
    key, names = node.key, frozenset(source.name for source in node.inputs)
    if key.node != chunks.node or chunks.walk not in parts.engine.policy(key.node, key.walk).batch_with:
        return None
    return DecodeWalk(key, names) if names <= set(node.self_inputs) and not node.streams else None
