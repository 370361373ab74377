"""A node with recurrent states under a worker: little room, chunks, shared beginnings, requests that give way and come
back; every text is that of a plain function over all tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.instance import Instance, Tuning
from support.tiny_decoder import NODE, VOCAB
from support.tiny_hybrid import TinyHybrid, hybrid_spec
from support.tiny_serving import TinyLlama

from mstar.communication.messages import SamplingParams
from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.spec import NodeResourceSpec
from mstar.engine.submodule import EngineInputs, NodeOutputs
from mstar.model.base import PromptRequest
from mstar.model.llama.model import EMBED


class HybridNode(TinyHybrid):
    """Without the output that only tests of the engine look at."""

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {"token": super().forward_batched(graph_walk, inputs)["token"]}

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        return None if graph_walk == EMBED else super().get_chunking_policy(graph_walk)


class HybridModel:
    """Llama's walks over a hybrid node."""

    def __init__(self, tiny: TinyLlama) -> None:
        self._model = tiny.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_node_resources(self) -> Sequence[NodeResourceSpec]:
        return (hybrid_spec(),)


@dataclass
class Run:
    """One instance; `prompts[rid]`: ids and tokens to draw."""

    tiny: TinyLlama
    tuning: Tuning
    prompts: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    node: HybridNode = field(default_factory=HybridNode)

    def __post_init__(self) -> None:
        self.model: Any = HybridModel(self.tiny)
        self.instance = Instance(self.model, lambda _: self.node, {NODE: 0}, self.tuning)

    def submit(self, rid: str, ids: list[int], max_tokens: int, priority: int = 0) -> None:
        self.prompts[rid] = ids, max_tokens
        prompt = self.tiny.model.process_prompt(PromptRequest("native", token_ids=tuple(ids)))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.instance.submit(rid, prompt, params, priority=priority)

    def tick(self) -> bool:
        busy = self.instance.tick()
        for resource in self.instance.parts[0].engine._resources:
            if isinstance(resource, PagedKV):
                resource.arena.check()
                assert resource.holdings.states is not None
                resource.holdings.states.check()
        return busy

    def run(self) -> None:
        for _ in range(4000):
            if not self.tick() and not self.instance.num_handles:
                return
        raise AssertionError("not done")

    def check(self) -> None:
        for rid, (ids, max_tokens) in self.prompts.items():
            result = self.instance.results[rid]
            if not result.aborted:
                assert result.failure is None, result.failure
                assert result.tokens == self.node.reference_greedy(ids, max_tokens), rid
        assert self.instance.held(0) == {}
        gauges = self.instance.gauges(0)
        assert gauges['mstar_slots{pool="state",state="live"}'] == 0
        self.instance.close()


def with_room(tuning: Tuning, pages: int, slots: int, *, host: bool = False, **more: Any) -> Tuning:
    engine = {"num_slots": {"state": slots}, "host_bytes": {"kv": 1 << 16, "state": 1 << 10} if host else {}}
    settings = {"max_step_tokens": 9, "max_seq_len": 64, "max_rows": 6, **more}
    return Tuning(
        overlap=tuning.overlap,
        threaded=tuning.threaded,
        late=tuning.late,
        num_pages={"kv": pages},
        engine=engine,
        **settings,
    )


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_many_requests_with_room_for_few(tiny: TinyLlama, tuning: Tuning, seed: int, host: bool):
    rng = random.Random(seed)
    run = Run(tiny, with_room(tuning, rng.choice((9, 14)), rng.choice((1, 2, 4)), host=host, capture_sizes=(2, 4)))
    begins = [[rng.randrange(VOCAB) for _ in range(length)] for length in (0, 4, 9, 13)]
    for index in range(14):
        for _ in range(rng.randint(0, 4)):
            run.tick()
        ids = [*rng.choice(begins), *[rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]]
        run.submit(f"r{index}", ids, rng.randint(1, 12), priority=rng.choice((0, 0, 0, -1)))
        if rng.random() < 0.1:
            run.instance.abort(rng.choice(list(run.prompts)))
    run.run()
    run.check()


def test_with_one_slot_requests_run_one_after_the_other(tiny: TinyLlama, tuning: Tuning):
    run = Run(tiny, with_room(tuning, 40, 1))
    for index in range(4):
        run.submit(f"r{index}", [index + 1] * 6, 5)
    run.run()
    assert max(len(step.rows) for step in run.instance.steps) == 1
    run.check()


def test_an_important_request_takes_the_slot_of_another_which_comes_back(tiny: TinyLlama, tuning: Tuning):
    run = Run(tiny, with_room(tuning, 40, 1))
    run.submit("first", [7] * 9, 20)
    for _ in range(5):
        run.tick()
    run.submit("urgent", [8] * 5, 3, priority=-1)
    run.run()
    gauges = run.instance.gauges(0)
    assert gauges['mstar_evictions_total{kind="recompute"}'] == 1
    run.check()


def test_prompts_that_share_a_beginning_reuse_it(tiny: TinyLlama, tuning: Tuning):
    """The second finds where they part, from the third on it is reused."""
    run, system = Run(tiny, with_room(tuning, 60, 12)), [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
    for index in range(4):
        run.submit(f"r{index}", [*system, *[30 + index] * 6], 3)
        run.run()
    assert run.instance.gauges(0)["mstar_prefix_hit_tokens_total"] == 24
    run.check()
