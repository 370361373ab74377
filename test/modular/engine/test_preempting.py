"""Requests whose pages are taken away, and who come back: by offload or by computing them again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine_rig import EngineRig
from support.memory_rig import Armed, MemoryRig

from mstar.engine.device_ops import DeviceOp
from mstar.engine.execution import AdmitOutcome

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
OTHER = [9, 9, 9, 9, 8, 8, 8, 8, 7]


def started(*prompts: list[int], most: int = 20, **settings: object) -> MemoryRig:
    """A rig in which each request has computed its prompt and drawn a few tokens."""
    rig = MemoryRig(**settings)  # type: ignore[arg-type]
    for handle, prompt in enumerate(prompts):
        assert rig.admit(handle, prompt, most)
        rig.compute(handle, len(prompt) + 2)
    return rig


# what is promised


def test_what_can_be_computed_again_is_promised_its_prompt_and_one_token():
    rig = MemoryRig()
    assert rig.admit(0, PROMPT[:8], 24)
    assert rig.arena.promised[0] == 3
    assert rig.admit(1, PROMPT[:7], 24)
    assert rig.arena.promised[1] == 2


def test_what_the_host_has_room_for_is_promised_there_whole():
    rig = MemoryRig(recompute=False, num_host_pages=11)
    assert rig.admit(0, PROMPT, 24) and rig.host is not None
    assert (rig.arena.promised[0], rig.host.arena.promised[0]) == (3, 6)
    assert rig.admit(1, OTHER, 24)  # no room on the host for a second: all of it on the device
    assert (rig.arena.promised[1], rig.host.arena.promised[1]) == (6, 0)
    assert [rig.holdings.reclaimable(handle) for handle in (0, 1)] == [3, 0]
    assert rig.holdings.unused(1) == 6, "who computed nothing loses nothing"
    rig.holdings.preempt(1)
    assert rig.holdings.resume(1) and rig.arena.promised[1] == 6
    rig.compute(1, 1)
    assert rig.holdings.unused(1) == 0
    with pytest.raises(RuntimeError, match="cannot be preempted"):
        rig.holdings.preempt(1)
    assert not rig.admit(2, OTHER, 24)  # 3 of 12 pages are left
    assert rig.host.arena.promised[2] == 0
    rig.check()


@pytest.mark.parametrize(("recompute", "promised", "lacking"), [(False, 6, 3), (True, 3, 0)])
def test_requests_over_several_workers_count_on_no_host(recompute: bool, promised: int, lacking: int):
    """Whatever the host has room for, they are all of one kind."""
    rig = MemoryRig(recompute=recompute, num_host_pages=11, num_pages=9)
    assert rig.admit(0, PROMPT, 24, spans_workers=True) and rig.host is not None
    assert (rig.arena.promised[0], rig.host.arena.promised[0]) == (promised, 0)
    rig.introduce(1, OTHER, 24, spans_workers=True)
    assert rig.holdings.lacking(1) == lacking
    assert rig.kv.reserve(1) == (lacking == 0)


def test_a_refusal_of_the_device_gives_the_hosts_promise_back():
    rig = MemoryRig(num_pages=4, recompute=False, num_host_pages=30)
    assert rig.admit(0, PROMPT, 16) and rig.host is not None
    before = rig.host.arena.num_unpromised
    assert not rig.admit(1, OTHER, 16)
    assert rig.host.arena.num_unpromised == before
    rig.check()


def test_a_refused_step_says_how_much_is_missing():
    rig = started(PROMPT, OTHER, num_pages=6)
    outcome = rig.arm({0: 3, 1: 6})
    assert outcome == AdmitOutcome((0, 1), "kv", 3)
    assert rig.holdings.reclaimable(1) == 3
    rig.holdings.preempt(1)
    assert isinstance(rig.arm({0: 3}), Armed)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=2, max_size=7),
    recompute=st.booleans(),
    host=st.sampled_from([0, 8, 30]),
)
def test_whatever_is_let_in_runs_to_its_end(sizes: list[tuple[int, int]], recompute: bool, host: int):
    """Nobody waits for room that only those who wait could give."""
    rig = MemoryRig(num_pages=10, num_host_pages=host, recompute=recompute)
    for handle, (num_prompt, drawn) in enumerate(sizes):
        rig.admit(handle, [handle] * num_prompt, num_prompt + drawn)
    rig.finish_all()


# computed again


@pytest.mark.parametrize("reuse", [False, True])
def test_a_row_with_drawn_tokens_gets_a_target(reuse: bool):
    rig = started(PROMPT, reuse=reuse)
    assert rig.holdings.preempt(0) == "recompute"
    assert rig.holdings.is_preempted(0) and rig.length(0) == 0
    assert rig.arena.num_free + rig.arena.num_cached == rig.num_pages and rig.arena.num_unpromised == rig.num_pages
    assert rig.holdings.resume(0)
    assert rig.kv.targets[0] == 11
    assert rig.length(0) == (8 if reuse else 0)  # its own pages, still cached
    assert rig.arena.promised[0] == 3
    rig.compute(0, 11)
    rig.compute(0, 14)
    rig.check_contents()


def test_a_row_whose_pages_are_all_cached_is_back_at_once():
    rig = MemoryRig(reuse_generated=True)
    assert rig.admit(0, PROMPT, 20)
    rig.compute(0, 12)
    rig.holdings.preempt(0)
    assert rig.holdings.resume(0)
    assert rig.length(0) == rig.kv.targets[0] == 12
    rig.compute(0, 15)


def test_a_row_in_the_middle_of_its_prompt_simply_goes_on():
    rig = MemoryRig()
    assert rig.admit(0, [*PROMPT, 1, 1, 1], 20)
    rig.compute(0, 6)
    rig.holdings.preempt(0)
    assert rig.holdings.resume(0)
    assert rig.kv.targets[0] == 0 and rig.length(0) == 4
    assert rig.wanted(0) == 8
    rig.compute(0)
    rig.check_contents()


def test_a_row_that_is_being_restored_keeps_its_target():
    rig = started(PROMPT, reuse=False)
    rig.holdings.preempt(0)
    assert rig.holdings.resume(0)
    rig.compute(0, 5)
    rig.holdings.preempt(0)
    assert rig.kv.targets[0] == 11
    assert rig.holdings.resume(0) and rig.length(0) == 0
    rig.compute(0, 12)
    rig.check_contents()


def test_adopted_again_is_not_counted_again():
    rig = started(PROMPT)
    assert rig.admit(1, PROMPT, 20)
    rig.compute(1)
    assert rig.holdings.num_adopted[1] == 8
    rig.holdings.preempt(1)
    rig.holdings.preempt(0)
    assert rig.holdings.resume(1) and rig.length(1) == 8
    assert rig.holdings.resume(0) and rig.length(0) == 8
    assert rig.holdings.num_adopted[:2].tolist() == [0, 8] and rig.holdings.num_adopted_total == 8


def test_pages_shared_with_a_running_row_are_not_reclaimed():
    rig = started(PROMPT)
    assert rig.admit(1, PROMPT, 20)
    rig.compute(1, 11)
    before = rig.arena.num_unpromised
    assert rig.holdings.reclaimable(1) == 1
    rig.holdings.preempt(1)
    assert rig.arena.num_unpromised == before + 1
    rig.check_contents()
    assert rig.holdings.resume(1) and rig.length(1) == 8


# offloaded


def test_an_offloaded_row_comes_back_as_it_was():
    rig = started(PROMPT, OTHER, num_host_pages=3, recompute=False, reuse=False, most=12)
    assert rig.holdings.preempt(0) == "offload"
    assert rig.host is not None and rig.host.arena.num_owned == 3
    for handle in (2, 3):  # the pages are used for something else meanwhile
        assert rig.admit(handle, [handle] * 9, 12)
        rig.compute(handle, 11)
        rig.close(handle)
    assert rig.holdings.resume(0)
    assert rig.length(0) == 11 and rig.host.arena.num_owned == 0 and rig.host.arena.promised[0] == 3
    rig.run_ops()
    rig.check_contents()
    assert rig.kv.targets[0] == 0


def test_an_offloaded_row_adopts_what_is_still_cached_and_reloads_the_rest():
    rig = started(PROMPT, num_host_pages=6, recompute=False)
    rig.holdings.preempt(0)
    assert rig.arena.num_cached == 2
    assert rig.holdings.resume(0)
    assert rig.arena.num_cached == 0
    ops = rig.kv._ops
    assert [(op.kind, op.src.size) for op in ops if op.kind != "poison"] == [("offload", 3), ("reload", 1)]
    rig.run_ops()
    rig.check_contents()
    rig.compute(0, 14)


def test_reload_is_ordered_behind_offload_and_poison_between_them():
    """All of it in one go, before the device has done anything."""
    rig = started(PROMPT, num_host_pages=6, recompute=False, reuse=False)
    old = rig.kv.stream(0).pages
    rig.holdings.preempt(0)
    assert rig.holdings.resume(0)
    ops: list[DeviceOp] = rig.kv._ops
    assert [op.kind for op in ops] == ["offload", "poison", "reload"]
    assert sorted(ops[0].src) == sorted(ops[1].dst) == sorted(old)
    assert ops[0].dst.tolist() == ops[2].src.tolist()
    rig.run_ops()
    rig.check_contents()
    reloaded = rig.kv.stream(0).pages
    assert not rig.kv.layer(0).k[reloaded[:2]].isnan().any()


def test_host_pages_change_hands_at_once():
    """The second's offload writes where the first's reload reads from: later."""
    rig = started(PROMPT, OTHER, num_host_pages=3, reuse=False)
    assert rig.holdings.preempt(0) == "offload"
    assert rig.holdings.resume(0)
    assert rig.holdings.preempt(1) == "offload"
    assert rig.holdings.resume(1)
    rig.run_ops()
    rig.check_contents()


def test_without_room_on_the_host_a_row_is_computed_again():
    rig = started(PROMPT, OTHER, num_host_pages=4)
    assert [rig.holdings.preempt(handle) for handle in (0, 1)] == ["offload", "recompute"]
    assert rig.holdings.num_preempted == {"offload": 1, "recompute": 1}
    assert rig.holdings.resume(0) and rig.holdings.resume(1)
    assert (rig.length(0), int(rig.kv.targets[0])) == (11, 0)
    assert (rig.length(1), int(rig.kv.targets[1])) == (8, 11)


def test_reloaded_pages_can_be_sealed():
    """What an offloaded row brings back is as good as what it computed."""
    prompt = [*PROMPT, 1, 1, 1, 1]
    rig = started(prompt, num_pages=6, num_host_pages=6)
    rig.holdings.preempt(0)
    assert rig.admit(1, OTHER, 24)
    rig.compute(1, 23)
    assert rig.arena.num_cached == 0
    rig.close(1)
    assert rig.holdings.resume(0)
    assert rig.length(0) == 15 and rig.arena.num_cached + rig.arena.num_owned == 5 + 1
    rig.compute(0, 16)
    assert rig.admit(2, prompt, 16) and rig.length(2) == 12
    rig.check_contents()


# however a request ends


@pytest.mark.parametrize("host", [0, 6])
def test_a_preempted_request_can_be_closed(host: int):
    rig = started(PROMPT, num_host_pages=host)
    rig.holdings.preempt(0)
    rig.close(0)
    rig.check()
    assert rig.arena.num_owned == 0 and not rig.holdings.is_preempted(0) and not rig.kv.targets[0]
    assert rig.host is None or rig.host.arena.num_unpromised == host
    assert rig.admit(0, OTHER, 20) and rig.length(0) == 0


def test_a_request_that_was_only_introduced_can_be_closed():
    rig = MemoryRig(num_host_pages=6, recompute=False)
    rig.introduce(0, PROMPT, 12)
    rig.close(0)
    rig.check()
    assert rig.admit(0, PROMPT, 12)
    rig.close(0)  # reserved, and never in a step
    rig.check()
    assert rig.arena.num_free == rig.num_pages


def test_a_row_without_room_stays_preempted_and_nothing_changes():
    rig = started(PROMPT, num_pages=6, reuse=False)
    rig.holdings.preempt(0)
    assert rig.admit(1, OTHER, 24)
    rig.compute(1, 14)
    before = rig.arena.num_unpromised
    assert not rig.holdings.can_resume(0) and not rig.holdings.resume(0)
    assert rig.holdings.is_preempted(0) and rig.arena.num_unpromised == before == 2
    rig.close(1)
    assert rig.holdings.resume(0)


def test_a_row_that_was_not_preempted_is_back_already():
    rig = started(PROMPT)
    before = rig.kv.stream(0).pages.tolist()
    assert rig.holdings.resume(0) and rig.kv.stream(0).pages.tolist() == before


@pytest.mark.parametrize("host", [0, 1 << 20])
@pytest.mark.parametrize("reuse", [False, True])
def test_tokens_are_those_of_undisturbed_rows(host: int, reuse: bool):
    prompts = [[(5 * i) % 61 for i in range(18)], [(3 * i) % 61 for i in range(7)]]
    rig = EngineRig(host_bytes={"kv": host} if host else {}, prefix_cache=reuse)
    for handle, prompt in enumerate(prompts):
        rig.open(handle, prompt)
    rig.generate([0, 1], 4)
    memory = rig.engine.memory
    for handle in (0, 1):
        assert memory.reclaimable(handle, "kv") > 0
        kind = memory.preempt(handle, "kv")
        assert kind == ("offload" if host else "recompute") and memory.is_preempted(handle)
        assert not memory.reclaimable(handle, "kv")
        assert memory.resume(handle)
        rows = np.array([handle])
        while rig.engine.restoring("LLM", rows.tolist()):
            rig.chunk("decode", {handle: 5})
        for _ in range(3):
            rig.decode(handle)
        assert rig.out[handle] == rig.decoder.reference_greedy(prompts[handle], 7)
    assert rig.engine.gauges()[f'mstar_evictions_total{{kind="{"offload" if host else "recompute"}"}}'] == 2
    rig.close_all()
    gauges = rig.engine.gauges()
    assert gauges['mstar_pages{pool="kv",state="owned"}'] == 0
    assert gauges.get('mstar_pages{pool="kv.host",state="owned"}', 0) == 0
