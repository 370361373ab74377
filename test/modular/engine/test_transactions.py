"""A step that is refused, abandoned or broken leaves every column as it was; a step that ran cannot be undone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.engine_rig import GREEDY, EngineRig, prompts, reserve, take

from mstar.communication.messages import SamplingParams
from mstar.engine.execution import AdmitOutcome, Step, StepState
from mstar.engine.resources.base import OpenConfig

PROMPTS = prompts(6, seed=11)


def columns(rig: EngineRig) -> dict[str, Any]:
    """Everything a step may move on the host."""
    arena = rig.kv.arena
    return {
        "lengths": rig.kv.lengths.tolist(),
        "held": arena.held.tolist(),
        "promised": arena.promised.tolist(),
        "table": rig.kv.streams.table.tolist(),
        "owners": arena.allocator.owners.tolist(),
        "free": (arena.allocator.num_free, arena.num_unpromised),
        "draws": rig.sampler.columns.num_draws.tolist(),
    }


def ready_rig(**config: Any) -> EngineRig:
    rig = EngineRig(**config)
    for handle in range(4):
        rig.open(handle, PROMPTS[handle])
    rig.prefill(0, 1, 2)
    return rig


@pytest.mark.parametrize("captured", [(), (4, 8)])
def test_abandon_restores_every_column(captured: tuple[int, ...]):
    rig = ready_rig(capture_sizes=captured)
    before = columns(rig)
    for parts in ((take("decode", [0, 1, 2]),), (take("decode", [2]), take("prefill", [3]))):
        step = rig.arm(*parts)
        assert columns(rig) != before
        rig.engine.abandon(step)
        assert columns(rig) == before
        assert step.state is StepState.ABANDONED
    rig.check()


def test_abandon_after_another_request_has_left():
    """What others give back in between stays given back."""
    rig = ready_rig()
    step = rig.arm(take("decode", [0, 1]))
    rig.engine.memory.close(2)
    rig.engine.abandon(step)
    del rig.out[2]
    rig.decode(0, 1)
    assert rig.out[0] == rig.decoder.reference_greedy(PROMPTS[0], 2)
    rig.close_all()
    assert rig.kv.arena.num_unpromised == rig.kv.num_pages_total


def test_abandoning_a_step_planned_ahead_keeps_the_step_before():
    rig = ready_rig()
    cur = rig.arm(take("decode", [0, 1]))
    rig.engine.submit(cur)
    nxt = rig.arm(take("decode", [0, 1]))
    rig.engine.abandon(nxt)
    rig.end(cur)
    for _ in range(6):
        rig.decode(1, 0)
    for handle in (0, 1):
        assert rig.out[handle] == rig.decoder.reference_greedy(PROMPTS[handle], 8)


def test_abandoned_draws_are_drawn_again():
    """The draw index goes back with the step, so a seeded continuation does not depend on abandoned steps."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=24)
    outputs = []
    for abandon in (False, True):
        rig = EngineRig()
        rig.open(0, PROMPTS[0], params)
        rig.prefill(0)
        for _ in range(8):
            if abandon:
                rig.engine.abandon(rig.arm(take("decode", [0])))
            rig.decode(0)
        outputs.append(rig.out[0])
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 2


def test_each_end_of_a_step_happens_once():
    rig = ready_rig()
    step = rig.arm(take("decode", [0]))
    with pytest.raises(RuntimeError, match="planned once"):
        rig.engine.plan(step)
    with pytest.raises(RuntimeError, match="admitted once"):
        rig.engine.admit(step)
    rig.engine.abandon(step)
    for again in (rig.engine.abandon, rig.engine.submit, rig.engine.plan):
        with pytest.raises(RuntimeError):
            again(step)
    done = rig.decode(0)
    for again in (rig.engine.abandon, rig.engine.submit, rig.engine.finish):
        with pytest.raises(RuntimeError):
            again(done)


def test_a_refusal_says_who_and_changes_nothing():
    """Room for ten pages of four tokens; three requests that nobody promised anything."""
    rig = EngineRig(num_pages={"kv": 10})
    for handle, length in ((0, 16), (1, 16), (2, 12)):
        rig.engine.memory.introduce(handle, OpenConfig(GREEDY, np.arange(length, dtype=np.int32), 64))
        rig.engine.memory.open(handle)
    before = columns(rig)
    step, _ = rig.engine.build([take("prefill", [0, 1, 2])])
    assert step is not None
    assert rig.engine.admit(step) == AdmitOutcome((2,), "kv", missing=1)
    assert columns(rig) == before
    rig.out = {0: [], 1: [], 2: []}
    rig.prefill(0, 1)
    rig.check()


def test_promised_room_is_never_refused():
    """A cache that nothing could bring back is promised whole."""
    rig = EngineRig(num_pages={"kv": 20}, walk_inputs={})
    rig.open(0, list(range(8)))  # 8 + 24 tokens: 8 pages
    rig.open(1, list(range(8)))
    assert not reserve(rig, 2, 32)
    rig.engine.memory.close(2)
    assert reserve(rig, 2, 16)
    rig.generate([0, 1], 24)
    assert rig.engine.gauges() == {
        'mstar_pages{pool="kv",state="free"}': 20.0 - 16,
        'mstar_pages{pool="kv",state="owned"}': 16.0,
        'mstar_pages{pool="kv",state="cached"}': 0.0,
        "mstar_prefix_hit_tokens_total": 0.0,
        'mstar_evictions_total{kind="cached"}': 0.0,
        'mstar_evictions_total{kind="offload"}': 0.0,
        'mstar_evictions_total{kind="recompute"}': 0.0,
    }
    rig.engine.memory.close(2)
    rig.close_all()


def test_no_request_gets_more_than_the_pool_or_a_row_can_hold():
    assert EngineRig(num_pages={"kv": 5}).engine.memory.most_tokens() == 20
    rig = EngineRig(num_pages={"kv": 500})
    assert rig.engine.memory.most_tokens() == 64
    assert reserve(rig, 0, 64)
    assert not reserve(rig, 1, 65)


def _raise(*_: Any) -> Any:
    raise LookupError("no such page")


@pytest.mark.parametrize("key", ["kv", "attn", "rope", "sampler"])
@pytest.mark.parametrize("stage", ["admit", "plan", "advance"])
def test_a_resource_that_breaks_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, key: str, stage: str):
    rig = ready_rig()
    before = columns(rig)
    with monkeypatch.context() as patch:
        patch.setattr(rig.resource(key), stage, _raise)
        step, _ = rig.engine.build([take("decode", [0, 1, 2])])
        assert step is not None
        assert rig.engine.admit(step).ok
        rig.engine.plan(step)
    assert step.failed == dict.fromkeys([0, 1, 2], f"{stage} of resource '{key}' raised LookupError: no such page")
    assert columns(rig) == before
    rig.check()
    rig.decode(0, 1, 2)
    assert rig.out[1] == rig.decoder.reference_greedy(PROMPTS[1], 2)


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go, steps run, are refused or abandoned, planned ahead of one another; pages balance always and
    every token is the reference's."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = EngineRig(num_pages={"kv": 18}, capacity=5, capture_sizes=(2, 4), walk_inputs={})
        self.prompts: dict[int, list[int]] = {}
        self.waiting: set[int] = set()
        self.cur: Step | None = None

    @rule(handle=st.integers(0, 4), length=st.integers(1, 12), tokens=st.integers(1, 10))
    def open(self, handle: int, length: int, tokens: int) -> None:
        if handle in self.prompts:
            return
        prompt = [(7 * handle + 3 * i) % 61 for i in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        config = OpenConfig(params, np.array(prompt, np.int32), length + tokens)
        self.rig.engine.memory.introduce(handle, config)
        if not self.rig.engine.memory.reserve(handle):
            self.rig.engine.memory.close(handle)
            return
        self.rig.engine.memory.open(handle)
        self.rig.out[handle] = []
        self.prompts[handle] = prompt
        self.waiting.add(handle)

    @rule(data=st.data(), abandon=st.booleans(), ahead=st.booleans())
    def step(self, data: st.DataObject, abandon: bool, ahead: bool) -> None:
        flying = set() if self.cur is None else set(self.cur.handles.tolist())
        running = [h for h in self.prompts if h not in self.waiting and self.room(h, h in flying)]
        decode = data.draw(st.lists(st.sampled_from(running), unique=True)) if running else []
        prefill = data.draw(st.lists(st.sampled_from(sorted(self.waiting)), unique=True)) if self.waiting else []
        parts = [take(walk, rows) for walk, rows in (("decode", decode), ("prefill", prefill)) if rows]
        if not parts:
            return
        step = self.rig.arm(*parts)
        if abandon:
            self.rig.engine.abandon(step)
            return
        self.rig.engine.submit(step)
        self.waiting -= set(prefill)
        self.land()
        self.cur = step
        if not ahead:
            self.land()

    def room(self, handle: int, in_flight: bool) -> bool:
        return self.rig.kv.lengths[handle] < self.rig.kv.arena.promised[handle] * 4

    @rule()
    def land(self) -> None:
        if self.cur is not None:
            cur, self.cur = self.cur, None
            self.rig.end(cur)

    @rule(handle=st.integers(0, 4))
    def close(self, handle: int) -> None:
        self.land()
        if handle in self.prompts:
            self.rig.engine.memory.close(handle)
            prompt, out = self.prompts.pop(handle), self.rig.out.pop(handle)
            self.waiting.discard(handle)
            assert out == self.rig.decoder.reference_greedy(prompt, len(out))

    @invariant()
    def balanced(self) -> None:
        self.rig.kv.arena.check()
        allocator = self.rig.kv.arena.allocator
        assert allocator.num_free + allocator.num_owned == 18
        assert allocator.num_owned == int(self.rig.kv.arena.held.sum())

    def teardown(self) -> None:
        for handle in list(self.prompts):
            self.close(handle)
        self.land()
        assert self.rig.kv.arena.num_unpromised == 18
        self.rig.check()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=25, stateful_step_count=20)


def test_all_columns_are_compared():
    """The comparison above would see each kind of change."""
    rig = ready_rig()
    before = columns(rig)
    changes: list[Callable[[], Any]] = [
        lambda: rig.kv.lengths.__iadd__(1),
        lambda: rig.kv.arena.held.__iadd__(1),
        lambda: rig.kv.streams.table.__iadd__(1),
        lambda: rig.sampler.columns.num_draws.__iadd__(1),
        lambda: rig.kv.arena.allocator.owners.__iadd__(1),
    ]
    for change in changes:
        change()
        after = columns(rig)
        assert after != before
        before = after
