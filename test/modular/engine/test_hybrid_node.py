"""A node with a cache and a recurrent state, through the engine: every token is that of a plain function over all
tokens, so a wrong restore, a missed cut or another row's state shows."""

import pytest
import torch
from support.engine_rig import GREEDY, EngineRig, portion, prompts, take
from support.late_executor import LateExecutor
from support.tiny_decoder import NODE
from support.tiny_hybrid import TinyHybrid, hash_of, hybrid_spec

from mstar.communication.messages import SamplingParams
from mstar.engine.engine_config import EngineConfig
from mstar.engine.execution import Step
from mstar.engine.memory_plan import plan_memory
from mstar.engine.resource_sizes import resource_sizes
from mstar.engine.resources.base import OpenConfig
from mstar.engine.resources.recurrent_state_pool import RecurrentStatePool, StateDtypes, slot_bytes
from mstar.engine.spec import AttentionSpec, NodeResourceSpec, PagedKVSpec, RecurrentStateSpec, StateBlock
from mstar.engine.step_timing import LARGE, SMALL, DecodeWalk, measure_step_cost
from mstar.graph.protocol import ReadyKey

PROMPTS = prompts(6, seed=11)
SYSTEM = list(range(1, 14))


class HybridRig(EngineRig):
    """`computed[handle]`: prompt tokens of each of its steps."""

    def __init__(self, **config: object) -> None:
        super().__init__({NODE: TinyHybrid()}, (hybrid_spec(),), **config)  # type: ignore[arg-type]
        self.computed: dict[int, list[int]] = {}

    @property
    def pool(self) -> RecurrentStatePool:
        found = self.resource("state")
        assert isinstance(found, RecurrentStatePool)
        return found

    def prompt(self, *handles: int, limit: int = 1 << 20) -> None:
        """Chunks of at most `limit` tokens until the prompts are computed."""
        going = list(handles)
        while going:
            step = self.run(portion("prefill", dict.fromkeys(going, limit)))
            self._note(step)
            assert not step.failed, step.failed
            unfinished = step.unfinished_in(step.parts[0])
            going = [going[place] for place in unfinished]

    def whole(self, handle: int, prompt: list[int], num_tokens: int = 4, *, limit: int = 1 << 20) -> list[int]:
        """The tokens of one request that comes and goes."""
        self.open(handle, prompt)
        self.prompt(handle, limit=limit)
        for _ in range(num_tokens - 1):
            self.decode(handle)
        self.check()
        self.engine.memory.close(handle)
        return self.out.pop(handle)

    def check(self) -> None:
        super().check()
        self.pool.states.check()

    def _note(self, step: Step) -> None:
        for handle, span in zip(step.handles.tolist(), step.spans.tolist(), strict=True):
            self.computed.setdefault(handle, []).append(span)


@pytest.mark.parametrize("limit", [1, 3, 4, 8, 64])
@pytest.mark.parametrize("capture", [(), (2, 8)])
def test_tokens_are_those_of_the_plain_function(limit: int, capture: tuple[int, ...]):
    rig = HybridRig(capture_sizes=capture)
    for handle, prompt in enumerate(PROMPTS):
        rig.open(handle, prompt)
    rig.prompt(*range(6), limit=limit)
    for _ in range(7):
        rig.decode(*range(6))
    for handle, prompt in enumerate(PROMPTS):
        assert rig.out[handle] == rig.decoder.reference_greedy(prompt, 8)
    rig.close_all()


def test_steps_planned_ahead_go_on_from_states_that_are_still_computed():
    rig = HybridRig(executor=LateExecutor())
    rig.open(0, SYSTEM)
    cur = rig.arm(portion("prefill", {0: 8}))
    rig.engine.submit(cur)
    for walk in ("prefill", "prefill", "decode", "decode", "decode"):
        nxt = rig.arm(take(walk, [0]))
        rig.engine.submit(nxt)
        rig.end(cur)
        cur = nxt
    rig.end(cur)
    assert rig.out[0] == rig.decoder.reference_greedy(SYSTEM, 4)
    rig.close_all()


@pytest.mark.parametrize("extra", range(9))
def test_a_prompt_that_comes_again_answers_alike_and_computes_at_most_a_page(extra: int):
    """Lengths of whole pages and everything between."""
    rig, prompt = HybridRig(), [*SYSTEM[:8], *[17] * extra]
    cold = rig.whole(0, prompt, 9)
    assert cold == rig.decoder.reference_greedy(prompt, 9)
    rig.computed.clear()
    assert rig.whole(1, prompt, 9) == cold
    assert sum(rig.computed[1]) <= 4


def test_a_shared_beginning_is_reused_from_the_third_prompt_on():
    rig = HybridRig()
    for handle in range(4):
        prompt = [*SYSTEM, *[30 + handle] * 9]
        assert rig.whole(handle, prompt) == rig.decoder.reference_greedy(prompt, 4)
    assert [sum(rig.computed[handle]) for handle in range(4)] == [22, 22, 10, 10]
    assert rig.computed[1][0] == 12  # cut where the two prompts part


def test_generated_tokens_are_reused_where_asked_for():
    rig = HybridRig(reuse_generated=True)
    answer = rig.whole(0, SYSTEM, 12)
    turn = [*SYSTEM, *answer, 5]
    assert rig.whole(1, turn) == rig.decoder.reference_greedy(turn, 4)
    assert sum(rig.computed[1]) == len(turn) - 24  # 13 + 11 tokens were in the cache, all of full pages


def test_no_row_sees_anothers_state_however_slots_are_recycled():
    """Three slots for two rows at a time; freed slots are NaN, and each row's blocks must belong together."""
    rig = HybridRig(num_slots={"state": 3})
    for round_ in range(12):
        pair = [PROMPTS[round_ % 6] or [1], [*SYSTEM[: round_ + 1]]]
        for handle, prompt in enumerate(pair):
            rig.open(handle, prompt)
        rig.prompt(0, 1, limit=5)
        rig.decode(0, 1)
        for handle, prompt in enumerate(pair):
            assert rig.out.pop(handle) == rig.decoder.reference_greedy(prompt, 2)
            rig.engine.memory.close(handle)
        rig.check()


def test_the_state_is_the_hash_of_the_tokens():
    rig = HybridRig()
    rig.open(0, SYSTEM)
    rig.prompt(0)
    slot = int(rig.pool.states.live[0])
    assert rig.pool.layer(1).blocks["hash"][slot].item() == hash_of(SYSTEM)
    rig.close_all()


@pytest.mark.parametrize("host", [False, True])
def test_preempted_rows_come_back_with_their_state(host: bool):
    given = {"kv": 1 << 20, "state": 1 << 20} if host else {}
    rig = HybridRig(host_bytes=given, num_slots={"state": 4})
    rig.open(0, SYSTEM)
    rig.prompt(0)
    rig.decode(0)
    memory = rig.engine.memory
    assert memory.reclaimable(0, "state") == 1 and memory.preempt(0, "state") == ("offload" if host else "recompute")
    assert memory.is_preempted(0) and memory.reclaimable(0, "kv") == 0
    for handle in (1, 2, 3):
        rig.whole(handle, [40 + handle] * 10)  # no snapshot of the first prompt is left
    assert memory.resume(0)
    while rig.engine.restoring(NODE, [0]):
        step = rig.run(portion("decode", {0: 5}))
        assert step.unfinished is not None and step.unfinished.all()
    for _ in range(3):
        rig.decode(0)
    assert rig.out[0] == rig.decoder.reference_greedy(SYSTEM, 5)
    rig.close_all()


def test_a_row_may_be_computed_again_from_a_snapshot():
    rig = HybridRig()
    rig.open(0, SYSTEM)
    rig.prompt(0)
    rig.decode(0)
    rig.engine.memory.preempt(0, "kv")
    assert rig.engine.memory.resume(0)
    assert int(rig.kv.lengths[0]) == 12 and int(rig.kv.targets[0]) == 14
    rig.run(portion("decode", {0: 5}))
    rig.decode(0)
    assert rig.out[0] == rig.decoder.reference_greedy(SYSTEM, 3)
    rig.close_all()


def test_out_of_memory_fails_the_rows_of_the_step_at_once():
    """A second try would go on from states that the first has moved."""
    rig = HybridRig()
    for handle in range(4):
        rig.open(handle, [handle + 1] * 3)
    rig.decoder.fail = [torch.OutOfMemoryError("no room")]
    step = rig.run(portion("prefill", dict.fromkeys(range(4), 8)))
    assert step.failed.keys() == {0, 1, 2, 3}
    assert "runs out of memory, with 4 rows" in step.failed[0] and rig.decoder.batch_sizes == [4]
    rig.close_all()


def test_chunks_end_where_states_are_kept_and_the_scheduler_knows():
    rig = HybridRig()
    rig.open(0, list(range(1, 15)))
    handles = torch.tensor([0]).numpy()
    assert rig.engine.pending_tokens(NODE, "prefill", handles).tolist() == [12]
    rig.prompt(0)
    assert rig.computed[0] == [12, 2]
    assert rig.engine.pending_tokens(NODE, "decode", handles).tolist() == [1]
    rig.close_all()


def test_measured_steps_are_not_cut_and_leave_nothing_behind():
    """Steps of the calibration are as long as they were asked to be, or what they tell is wrong."""
    rig = HybridRig(max_seq_len=2048, num_pages={"kv": 1200})  # too little for chunks far behind the begin
    spans: list[int] = []
    finish = rig.engine.finish

    def noting(step: Step) -> None:
        spans.extend(step.spans.tolist())
        finish(step)

    rig.engine.finish = noting  # type: ignore[method-assign]
    decode = DecodeWalk(ReadyKey(NODE, "decode"), frozenset({"token"}))
    assert measure_step_cost(rig.engine, ReadyKey(NODE, "prefill"), decode, budget_s=0.5) is not None
    assert set(spans) - {1, 4} == {SMALL, LARGE}
    assert rig.pool.states.slots.num_snapshots == 0 and rig.kv.arena.num_cached == 0
    rig.check()


def test_room_is_counted_in_slots_too():
    rig = HybridRig(num_slots={"state": 2})
    memory = rig.engine.memory
    rig.open(0, SYSTEM)
    rig.open(1, SYSTEM)
    memory.introduce(2, OpenConfig(GREEDY, torch.tensor([1, 2], dtype=torch.int32).numpy(), 8))
    assert not memory.reserve(2) and memory.available("state") == 0 and memory.lacking(2) == {"state": 1}
    assert memory.lacking(2, [1]) == {} and memory.available("state", [0, 1]) == 2
    assert memory.grows("kv") and not memory.grows("state") and set(memory.together("state")) == {"kv", "state"}
    gauges = rig.engine.gauges()
    assert [gauges[f'mstar_slots{{pool="state",state="{s}"}}'] for s in ("free", "live", "snapshot")] == [0, 2, 0]
    assert gauges['mstar_evictions_total{kind="snapshot"}'] == 0
    memory.close(2)
    rig.close_all()


# sizes

STATE = RecurrentStateSpec("state", "kv", 2, (StateBlock("a", (8,)), StateBlock("b", (4, 2), wide=True)))
CACHE = PagedKVSpec("kv", 1, 1, 4, 4)
SLOT, PAGE_BYTES = 2 * (8 + 8) * 4, 2 * 4 * 4 * 4


def sizes(*more: object, **config: object):
    spec = NodeResourceSpec(NODE, (STATE, CACHE, *more))  # type: ignore[arg-type]
    return resource_sizes([spec], EngineConfig(**{"max_rows": 4, "max_seq_len": 64, "capacity": 8, **config}))  # type: ignore[arg-type]


def test_states_take_half_of_the_memory_and_no_more_than_three_slots_a_row():
    narrow = StateDtypes(torch.bfloat16)
    assert slot_bytes(STATE, StateDtypes(torch.float32)) == SLOT and slot_bytes(STATE, narrow) == 2 * (16 + 32)
    assert slot_bytes(STATE, narrow._replace(wide=torch.bfloat16)) == 2 * (16 + 16)
    assert sizes(resource_bytes=10 * SLOT, state_dtypes={"state": torch.bfloat16}).slots == {"state": 5}
    assert sizes(resource_bytes=10 * SLOT).slots == {"state": 4}
    assert sizes(resource_bytes=10 * SLOT).pages == {"kv": 5 * SLOT // PAGE_BYTES - 1}
    rich = sizes(resource_bytes=100 * SLOT)
    assert rich.slots == {"state": 12} and rich.pages == {"kv": min(87 * SLOT // PAGE_BYTES - 1, 16 * 8)}
    assert sizes(resource_bytes=5 * SLOT).slots == {"state": 2}
    assert sizes().slots == {"state": 12} and sizes(num_slots={"state": 5}).slots == {"state": 5}
    with pytest.raises(ValueError, match=r"resources.state: 2 of its slots and an empty one take 384 bytes"):
        sizes(resource_bytes=SLOT)


def test_a_host_takes_pages_and_states_or_neither():
    both = sizes(host_bytes={"kv": 3 * PAGE_BYTES, "state": 2 * SLOT + 1})
    assert both.host_pages == {"kv": 3} and both.host_slots == {"state": 2}
    with pytest.raises(ValueError, match=r"resources.kv.host_bytes.*give resources.state.host_bytes as well"):
        sizes(host_bytes={"kv": 3 * PAGE_BYTES})
    with pytest.raises(ValueError, match=r"resources.state.host_bytes: 5 bytes, and a slot takes 128"):
        sizes(host_bytes={"kv": PAGE_BYTES, "state": 5})


def test_the_memory_plan_shows_states():
    spec = NodeResourceSpec(NODE, (STATE, CACHE))
    config = EngineConfig(max_rows=4, max_seq_len=64, capacity=8, num_slots={"state": 5})
    [row] = [row for row in plan_memory([spec], config) if row.name == "state"]
    assert row.detail == "5 states and snapshots, 2 layers of a 8, b 4 × 2" and row.num_bytes == 6 * SLOT


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (RecurrentStateSpec("other", "kv", 1, STATE.blocks), "pools of states beside the same cache 'kv'"),
        (RecurrentStateSpec("other", "nowhere", 1, STATE.blocks), "refers to 'nowhere', not declared there"),
        (AttentionSpec("attn", "state", 1), "is used as a paged cache, but is a RecurrentStatePool"),
    ],
)
def test_declarations_of_states_that_do_not_fit_end_start_up(more: object, message: str):
    resources = (*hybrid_spec().resources, more)
    keys = {getattr(spec, "key", None): spec for spec in resources}
    with pytest.raises(ValueError, match=message):
        EngineRig({NODE: TinyHybrid()}, (NodeResourceSpec(NODE, tuple(keys.values())),))  # type: ignore[arg-type]


def test_sampled_rows_do_not_depend_on_what_was_restored():
    rig, params = HybridRig(), SamplingParams(temperature=0.9, seed=7, max_tokens=8)
    outs = []
    for handle in range(2):
        rig.open(handle, SYSTEM, params)
        rig.prompt(handle)
        for _ in range(5):
            rig.decode(handle)
        outs.append(rig.out[handle])
    assert outs[0] == outs[1]
    rig.close_all()
