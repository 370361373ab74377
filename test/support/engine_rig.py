"""Drives an engine by hand, as a worker's loop would: opens requests, runs steps, plans ahead, abandons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from support.tiny_decoder import NODE, TinyDecoder, decoder_spec

from mstar.communication.messages import SamplingParams
from mstar.communication.tensor_store import TensorStore
from mstar.engine.engine import Engine
from mstar.engine.engine_config import EngineConfig
from mstar.engine.execution import Portion, Step
from mstar.engine.resources.base import OpenConfig, Resource
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.sampler import Sampler
from mstar.engine.spec import NodeResourceSpec
from mstar.engine.submodule import NodeSubmodule
from mstar.graph.protocol import LIVE_COLUMN, ReadyKey, TakenRows
from mstar.platforms.executor import DeviceExecutor, InlineExecutor

WALK_INPUTS = {NODE: {"prefill": frozenset[str](), "decode": frozenset({"token"})}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def take(walk: str, rows: Sequence[int], node: str = NODE, **ids: Sequence[int]) -> TakenRows:
    """Rows as the graph runtime hands them over; a decode row's token is live."""
    given: Mapping[str, Sequence[int]] = {"token": [LIVE_COLUMN] * len(rows)} if walk == "decode" else ids
    return TakenRows(ReadyKey(node, walk), list(rows), given, {}, [0] * len(rows), [False] * len(rows))


def portion(walk: str, limits: Mapping[int, int]) -> Portion:
    """Rows with the most tokens that each may compute."""
    return Portion(take(walk, list(limits)), np.array(list(limits.values()), np.int32))


class EngineRig:
    """An engine with one tiny decoder, unless other nodes are given. `out[handle]`: tokens drawn so far."""

    def __init__(
        self,
        nodes: Mapping[str, NodeSubmodule] | None = None,
        specs: Sequence[NodeResourceSpec] | None = None,
        executor: DeviceExecutor | None = None,
        **config: Any,
    ) -> None:
        self.nodes = {NODE: TinyDecoder()} if nodes is None else nodes
        self.store = TensorStore()
        self.executor = InlineExecutor() if executor is None else executor
        settings: dict[str, Any] = {"max_rows": 8, "max_seq_len": 64, "capacity": 12, "debug_poison": True}
        settings |= {"walk_inputs": WALK_INPUTS, **config}
        self.engine = Engine(
            self.nodes,
            (decoder_spec(),) if specs is None else specs,
            self.store,
            self.executor,
            EngineConfig(**settings),
        )
        self.engine.capture()
        self.out: dict[int, list[int]] = {}

    @property
    def decoder(self) -> TinyDecoder:
        node = self.nodes[NODE]
        assert isinstance(node, TinyDecoder)
        return node

    def resource(self, key: str, node: str = NODE) -> Resource:
        return self.engine._nodes[node].resources[key]

    @property
    def kv(self) -> PagedKV:
        found = self.resource("kv")
        assert isinstance(found, PagedKV)
        return found

    @property
    def sampler(self) -> Sampler:
        found = self.resource("sampler")
        assert isinstance(found, Sampler)
        return found

    def open(self, handle: int, prompt: Sequence[int], params: SamplingParams = GREEDY) -> None:
        ids = np.array(prompt, np.int32)
        total = ids.size + params.max_tokens
        config = OpenConfig(params, ids, total)
        self.engine.memory.introduce(handle, config)
        assert self.engine.memory.reserve(handle)
        self.engine.memory.open(handle)
        self.out[handle] = []

    def arm(self, *parts: TakenRows | Portion) -> Step:
        """Build, admit, plan."""
        step, declined = self.engine.build(parts)
        assert step is not None and not declined and not step.failed, (declined, step and step.failed)
        outcome = self.engine.admit(step)
        assert outcome.ok, outcome
        self.engine.plan(step)
        return step

    def end(self, step: Step) -> Step:
        """Wait for a submitted step, read its tokens, publish."""
        assert step.event is not None and step.event.wait(20)
        self.engine.finish(step)
        if step.error is None and "token" in step.outputs.host:
            going = [False] * step.num_rows if step.unfinished is None else step.unfinished.tolist()
            for handle, token, goes_on in zip(step.handles.tolist(), step.host("token").tolist(), going, strict=True):
                if handle not in step.failed and handle not in step.dropped and not goes_on:
                    self.out[handle].append(token)
        gone = step.dropped | step.failed.keys()
        self.engine.publish(step, np.array([handle not in gone for handle in step.handles.tolist()]))
        for column in step.outputs.ids.values():  # nobody routes here, so nobody keeps them
            if column is not None and step.error is None:
                self.store.free(
                    [i for i, handle in zip(column.tolist(), step.handles, strict=True) if i and handle not in gone]
                )
        return step

    def run(self, *parts: TakenRows | Portion) -> Step:
        """One whole step."""
        step = self.arm(*parts)
        self.engine.submit(step)
        return self.end(step)

    def chunk(self, walk: str, limits: Mapping[int, int]) -> Step:
        """One step in which each row computes at most so many tokens."""
        return self.run(portion(walk, limits))

    def prefill(self, *rows: int) -> Step:
        return self.run(take("prefill", rows))

    def decode(self, *rows: int) -> Step:
        return self.run(take("decode", rows))

    def generate(self, rows: Sequence[int], num_tokens: int, *, ahead: bool = False) -> None:
        """Prefill and decode `rows` together. `ahead`: each step is planned while the one before is unfinished."""
        if not ahead:
            self.prefill(*rows)
            for _ in range(num_tokens - 1):
                self.decode(*rows)
            return
        cur = self.arm(take("prefill", rows))
        self.engine.submit(cur)
        for _ in range(num_tokens - 1):
            nxt = self.arm(take("decode", rows))
            self.engine.submit(nxt)
            self.end(cur)
            cur = nxt
        self.end(cur)

    def close_all(self) -> None:
        for handle in list(self.out):
            self.engine.memory.close(handle)
        self.check()

    def check(self) -> None:
        """Pages and promises in balance, no staging slot and no tensor left behind."""
        for node in self.engine._nodes.values():
            assert node.staging.num_in_use == 0
            for resource in node.resources.values():
                if isinstance(resource, PagedKV):
                    resource.arena.check()
        assert self.store.num_live == 0


def reserve(rig: EngineRig, handle: int, num_tokens: int) -> bool:
    """Introduce a request that will hold `num_tokens`, all but one of them its prompt's, and ask for its room."""
    rig.engine.memory.introduce(handle, OpenConfig(GREEDY, np.full(num_tokens - 1, handle, np.int32), num_tokens))
    return rig.engine.memory.reserve(handle)


def alone(prompt: Sequence[int], num_tokens: int, params: SamplingParams = GREEDY, seed: int = 0) -> list[int]:
    """The tokens of one request that has an engine to itself."""
    rig = EngineRig({NODE: TinyDecoder(seed)})
    rig.open(0, prompt, params)
    rig.generate([0], num_tokens)
    return rig.out[0]


def prompts(count: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 61, (length,), generator=generator).tolist() for length in lengths]
