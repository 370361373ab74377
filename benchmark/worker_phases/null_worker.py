"""A real worker around the null model, and the messages that start requests on it. Loop thread of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmark.worker_phases.null_model import STOP_TOKEN, VOCAB_SIZE, NullSubmodule, build_null_model
from mstar.communication import host_tensors
from mstar.communication.bus import Bus
from mstar.communication.messages import OpenRequest, SamplingParams, StartWalk, ToWorker
from mstar.engine.engine_config import EngineConfig
from mstar.graph.compile import compile_walks
from mstar.model.base import PreparedPrompt
from mstar.model.llama.model import NODE, LlamaModel
from mstar.platforms.executor import InlineExecutor, ThreadedExecutor
from mstar.profile.phases import PhaseClock
from mstar.worker.assemble import WorkerSettings, assemble_worker
from mstar.worker.worker import Worker, WorkerParts

CACHE = "kv"
NEVER = 1 << 30


class NullWorker(NamedTuple):
    """A worker, what it is made of, and its model."""

    worker: Worker
    parts: WorkerParts
    model: LlamaModel


def build_null_worker(
    bus: Bus[ToWorker],
    settings: WorkerSettings,
    max_seq_len: int,
    *,
    device_s: float = 0.0,
    stop_iteration: int = NEVER,
    prefix_cache: bool = True,
    reuse_generated: bool = False,
    host_bytes: int = 0,
    num_pages: int | None = None,
    clock: PhaseClock | None = None,
) -> NullWorker:
    """A worker whose only node is the null model's. `device_s`, `stop_iteration`: see `NullSubmodule`. `num_pages`:
    None makes room for `max_rows` requests of `max_seq_len`."""
    model = build_null_model(max_seq_len)
    config = EngineConfig(
        max_rows=settings.max_rows,
        max_seq_len=max_seq_len,
        capacity=settings.capacity,
        num_pages={} if num_pages is None else {CACHE: num_pages},
        prefix_cache=prefix_cache,
        reuse_generated=reuse_generated,
        host_bytes={CACHE: host_bytes} if host_bytes else {},
        fingerprint="null model",
    )
    worker, parts = assemble_worker(
        compiled=compile_walks(model.walks(), model.partitions(), {NODE: 0}),
        nodes={NODE: NullSubmodule(device_s, stop_iteration)},
        specs=model.get_node_resources(),
        bus=bus,
        executor=ThreadedExecutor() if settings.overlap else InlineExecutor(),
        engine_config=config,
        settings=settings,
        clock=clock,
    )
    return NullWorker(worker, parts, model)


def random_ids(seed: int | Sequence[int], num_tokens: int) -> np.ndarray:
    """int32 [num_tokens]"""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)


def start_message(model: LlamaModel, rid: str, prompt_ids: np.ndarray, sampling: SamplingParams) -> StartWalk:
    """What the front sends for a request that lives on one worker. `prompt_ids` int32 [tokens]."""
    plan = model.plan_walks(PreparedPrompt(prompt_ids), sampling.max_tokens)
    opening = OpenRequest(sampling=sampling, prompt_ids=host_tensors.from_numpy(prompt_ids), limits=dict(plan.limits))
    (part,) = plan.partitions
    return StartWalk(rid=rid, partition=part.partition, walks=part.walks, last=True, open=opening)


def plain_sampling(seed: int, max_tokens: int) -> SamplingParams:
    """Temperature alone."""
    return SamplingParams(seed=seed, max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,))


def full_sampling(seed: int, max_tokens: int) -> SamplingParams:
    """Every transform of the sampler at once, and weak enough that the made logits win."""
    return SamplingParams(
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.01,
        bias_ids=(3, 5),
        bias_values=(1.0, -1.0),
        min_tokens=4,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=(STOP_TOKEN,),
    )
