"""Recurrent states beside a cache, case by case: where prompts are cut, which snapshots there are, who finds them, and
that pages and states are lost and come back together. Pages of four tokens; a state names the whole row so far."""

import numpy as np
import pytest
from support.memory_rig import PAGE, Armed, MemoryRig

from mstar.communication.messages import MediaSpan
from mstar.engine.resources.state_slots import StateSlots

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]


def rig(**config: object) -> MemoryRig:
    return MemoryRig(**{"num_pages": 40, "num_slots": 6, "max_seq_len": 64, **config})  # type: ignore[arg-type]


def chunks(one: MemoryRig, handle: int, prompt: list[int], most: int | None = None) -> list[int]:
    """Admit a request and compute its prompt in as few steps as cuts allow; returns their tokens, the adopted first."""
    assert one.admit(handle, prompt, len(prompt) + 4 if most is None else most)
    spans = [one.length(handle)]
    while one.length(handle) < len(prompt):
        spans.append(one.wanted(handle))
        one.run({handle: spans[-1]})
        one.check()
    return spans


def num_snapshots(one: MemoryRig) -> int:
    assert one.pool is not None
    return one.pool.states.slots.num_snapshots


def test_a_prompt_is_cut_where_its_last_full_page_ends():
    one = rig()
    assert chunks(one, 0, [*SYSTEM, 9, 9]) == [0, 8, 2]
    assert chunks(one, 1, [*SYSTEM, 9, 9]) == [8, 2]
    assert chunks(one, 2, [*SYSTEM, 7]) == [8, 1]
    assert one.holdings.num_adopted_total == 16 and num_snapshots(one) == 1


def test_a_prompt_that_ends_on_a_page_is_cut_before_it_too():
    """Its last token is always computed, so the same prompt goes on from a page before; a longer one from its end."""
    one = rig()
    assert chunks(one, 0, SYSTEM) == [0, 4, 4]
    assert chunks(one, 1, SYSTEM) == [4, 4]
    assert chunks(one, 2, [*SYSTEM, 3]) == [8, 1]


def test_short_prompts_and_others_without_keys_are_not_cut():
    one = rig()
    assert chunks(one, 0, [1, 2, 3]) == [0, 3]
    off = rig(reuse=False)
    assert chunks(off, 0, [*SYSTEM, 1]) == [0, 9] and num_snapshots(off) == 0


def test_the_third_prompt_behind_a_shared_beginning_reuses_it():
    one = rig(num_slots=8)
    assert chunks(one, 0, [*SYSTEM, *[10] * 6]) == [0, 12, 2]
    assert chunks(one, 1, [*SYSTEM, *[11] * 6]) == [0, 8, 4, 2]  # pages match up to 8, no state does
    assert chunks(one, 2, [*SYSTEM, *[12] * 6]) == [8, 4, 2]
    assert num_snapshots(one) == 4


def test_the_next_turn_of_a_conversation_reuses_the_turn_before_up_to_its_last_full_page():
    one, prompt = rig(num_slots=8), list(range(1, 11))
    chunks(one, 0, prompt)
    for turn in range(1, 5):
        longer = [*prompt, *[50 + turn] * 6]
        assert chunks(one, turn, longer)[0] == len(prompt) // PAGE * PAGE
        prompt = longer


def test_rows_side_by_side_make_one_snapshot_at_a_junction():
    """One runs ahead of another through the same prompt: the second finds each of its chunks."""
    one, prompt = rig(num_slots=8), list(range(1, 31))
    assert one.admit(0, prompt, 32)
    one.run({0: 4})
    assert one.admit(1, prompt, 32)
    spans: list[int] = []
    while one.length(1) < 30:
        one.run({0: 4})
        one.holdings.extend(1)
        spans.append(one.wanted(1))
        one.run({1: spans[-1]})
    assert spans == [8, 20, 2] and num_snapshots(one) == 2


@pytest.mark.parametrize("interval", [1, 8])
def test_states_are_kept_at_intervals_too(interval: int):
    one, step = rig(num_slots=12, snapshot_interval=interval), max(interval, PAGE)
    prompt = list(range(1, 27))  # ends at 26, its last full page at 24
    assert chunks(one, 0, prompt) == [0, *[step] * (24 // step), 2]
    assert chunks(one, 1, [*prompt[:18], *[9] * 8])[0] == 16


def test_drawn_tokens_leave_states_only_where_they_are_reused():
    for reuse_generated in (False, True):
        one = rig(reuse_generated=reuse_generated)
        chunks(one, 0, [*SYSTEM, 9], most=18)
        one.compute(0, 17)
        ids = one.rows[0].ids[:17]
        assert chunks(one, 1, ids)[0] == (16 if reuse_generated else 8)


def test_with_every_slot_taken_a_long_answer_replaces_its_own_states():
    one = rig(reuse_generated=True, num_slots=3)
    chunks(one, 0, [*SYSTEM, 9], most=30)
    one.compute(0, 29)  # ends of pages at 12, 16, 20, 24, 28
    assert num_snapshots(one) == 2
    ids = one.rows[0].ids[:29]
    one.close(0)
    assert chunks(one, 1, ids)[0] == 28
    one.close(1)
    assert chunks(one, 2, [*SYSTEM, 3])[0] == 8  # of the prompt


def test_live_requests_get_the_slots_of_snapshots():
    one = rig(num_slots=3)
    chunks(one, 0, [*SYSTEM, 9])
    assert one.pool is not None and one.slots.available() == 2
    assert one.admit(1, [5, 5], 4) and one.slots.available() == 1 and num_snapshots(one) == 1
    assert one.admit(2, [6, 6], 4) and one.slots.available() == 0 and num_snapshots(one) == 0
    one.introduce(3, [7, 7], 4)
    assert one.slots.lacking(3) == 1 and not one.kv.reserve(3) and not one.arena.held[3]
    assert one.slots.lacking(3, [0, 1]) == 0
    one.close(1)
    assert one.kv.reserve(3)


def test_the_last_snapshot_becomes_the_state_of_who_restores_it():
    one = rig(num_slots=2)
    chunks(one, 0, [*SYSTEM, 9])
    assert chunks(one, 1, [*SYSTEM, 7]) == [8, 1]
    assert one.pool is not None and num_snapshots(one) == 0 and one.pool.states.slots.num_live == 2


def test_without_a_slot_there_is_no_snapshot_and_nobody_waits_for_one():
    one = rig(num_slots=1)
    assert chunks(one, 0, [*SYSTEM, 9]) == [0, 8, 1]
    assert num_snapshots(one) == 0


def test_a_snapshot_goes_with_its_page():
    one = rig(num_pages=5)
    chunks(one, 0, [*SYSTEM, 9], most=10)
    one.close(0)
    assert num_snapshots(one) == 1 and one.arena.num_cached == 2
    chunks(one, 1, [20] * 17, most=18)
    one.check()
    assert one.pool is not None and one.pool.states.slots.num_evicted == 1


def test_the_snapshot_used_longest_ago_is_evicted():
    one = rig(num_slots=4)
    prompts = [[number] * 5 for number in range(1, 4)]
    for handle, prompt in enumerate(prompts):
        chunks(one, handle, prompt)
        one.close(handle)
    assert chunks(one, 5, prompts[0])[0] == 4  # used again
    chunks(one, 6, [9] * 5)
    assert num_snapshots(one) == 2
    one.close(6)
    assert one.admit(7, prompts[0], 8) and one.length(7) == 4
    assert one.admit(3, prompts[1], 8) and one.length(3) == 0


def test_an_abandoned_step_makes_no_snapshot():
    one = rig()
    assert one.admit(0, [*SYSTEM, 9], 12)
    armed = one.arm({0: 8})
    assert isinstance(armed, Armed) and num_snapshots(one) == 1
    one.abandon(armed)
    one.check()
    assert num_snapshots(one) == 0


def test_rows_that_fail_leave_no_snapshot():
    one = rig()
    assert one.admit(0, [*SYSTEM, 9], 12)
    one.rows[0].failing = True
    one.run({0: 8})
    one.check()
    assert num_snapshots(one) == 0
    one.close(0)
    assert chunks(one, 1, [*SYSTEM, 9])[0] == 0


def test_of_two_rows_with_one_prompt_the_one_that_did_not_fail_leaves_the_snapshot():
    one = rig()
    for handle in (0, 1):
        assert one.admit(handle, [*SYSTEM, 9], 12)
    one.rows[0].failing = True
    one.run({0: 8, 1: 8})
    assert num_snapshots(one) == 1
    assert chunks(one, 2, [*SYSTEM, 9])[0] == 8  # the rig sees to it that the state is whole


def test_a_request_that_leaves_before_its_step_is_published_leaves_no_slot_behind():
    """The step ended in an error, so that nothing of it was published."""
    one = rig()
    assert one.admit(0, [*SYSTEM, 9], 12)
    armed = one.arm({0: 8})
    assert isinstance(armed, Armed)
    one.submit(armed)
    one.flying.clear()
    one.rows[0].in_steps = 0
    one.close(0)
    one.check()
    assert one.slots.available() == 6 and num_snapshots(one) == 0


# preemption


def test_pages_and_state_move_to_the_host_together_and_come_back():
    one = rig(num_host_pages=9, num_host_slots=1, recompute=False)
    chunks(one, 0, [*SYSTEM, 9, 9])
    one.compute(0, 12)
    assert one.holdings.preempt(0) == "offload"
    one.check()
    chunks(one, 1, [30] * 10)  # others write over what it had
    assert one.holdings.resume(0) and one.length(0) == 12
    one.compute(0, 13)
    one.check()


def test_without_host_room_for_the_state_both_are_computed_again():
    one = rig(num_host_pages=9)
    chunks(one, 0, [*SYSTEM, 9, 9])
    one.compute(0, 12)
    assert one.holdings.preempt(0) == "recompute" and one.kv.targets[0] == 12
    assert one.holdings.resume(0) and one.length(0) == 8  # from the snapshot of its own prompt
    one.compute(0, 13)


def test_the_host_is_promised_for_both_or_for_neither():
    """Room for the pages of two, and for the state of one: the second is promised all of its pages on the device."""
    one = rig(num_host_pages=20, num_host_slots=1, recompute=False, num_pages=10)
    assert one.admit(0, [1] * 5, 20) and one.arena.promised[0] == 2
    assert one.admit(1, [2] * 5, 20) and one.arena.promised[1] == 5
    assert one.holdings.reclaimable(0) and not one.holdings.reclaimable(1)
    one.close(0)
    assert one.admit(2, [3] * 5, 20) and one.arena.promised[2] == 2


def test_what_a_request_with_media_computes_is_not_rebuilt_from_token_ids():
    image = (MediaSpan(1, 2, b"image"),)
    one = rig(reads_inputs=True)
    one.introduce(0, [1] * 6, 16, media=image, has_inputs=True)
    assert one.kv.reserve(0) and one.arena.promised[0] == 4
    one.rows[0].admitted = True
    assert one.holdings.unused(0)
    one.compute(0)
    assert not one.holdings.reclaimable(0) and one.slots.reclaimable(0) == 0
    with pytest.raises(RuntimeError, match="cannot be preempted"):
        one.holdings.preempt(0)
    assert one.admit(1, [2] * 6, 16) and one.arena.promised[1] == 2 and one.slots.reclaimable(1) == 1


def test_a_preempted_row_needs_a_slot_to_come_back():
    one = rig(num_slots=1)
    chunks(one, 0, [1] * 6)
    one.holdings.preempt(0)
    assert one.admit(1, [2] * 6, 8)
    assert not one.holdings.can_resume(0) and not one.holdings.resume(0)
    assert one.slots.reclaimable(1) == 1 and one.slots.available([1]) == 1
    one.close(1)
    assert one.holdings.resume(0)
    one.compute(0)


def test_what_is_freed_twice_is_an_error():
    slots = StateSlots(3)
    slot = slots.take_live()
    slots.release(slot)
    with pytest.raises(ValueError, match=f"slot {slot} is free, not live"):
        slots.release(slot)
    pending = slots.take_snapshot()
    assert pending is not None
    slots.publish(pending, b"key")
    with pytest.raises(ValueError, match="is snapshot, not pending"):
        slots.abandon(pending)
    with pytest.raises(ValueError, match="sink"):
        StateSlots(1)
    slots.check()


def test_cuts_of_many_rows_come_as_a_column():
    one = rig()
    for handle, size in enumerate((3, 8, 9, 30)):
        one.introduce(handle, list(range(size)), size + 2)
    handles = np.arange(4)
    cuts = one.holdings.tokens_to_cut(handles, np.array([0, 4, 8, 27], np.int32))
    assert cuts is not None and cuts.tolist() == [2**31 - 1, 4, 2**31 - 1, 1]
