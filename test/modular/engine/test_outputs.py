"""Outputs stay readable exactly as long as promised, and the guard is what makes it so."""

import numpy as np
import pytest
import torch
from support.engine_rig import EngineRig, prompts, take

from mstar.engine.output_ring import OutputRing, poison_tensor

PROMPTS = prompts(3, seed=6)


def test_slots_rotate_and_a_late_reader_sees_nonsense():
    ring = OutputRing(torch.device("cpu"), poison=True)
    views = [ring.begin().copy("token", torch.tensor([10 + step, 20 + step])) for step in range(2)]
    assert [view.tolist() for view in views] == [[10, 20], [11, 21]]
    third = ring.begin().copy("token", torch.tensor([12, 22]))
    assert views[0].tolist() != [10, 20]  # two more steps are submitted
    assert views[1].tolist() == [11, 21] and third.tolist() == [12, 22]


def test_without_poison_a_slot_lives_until_it_is_used_again():
    ring = OutputRing(torch.device("cpu"), poison=False)
    first = ring.begin().copy("x", torch.tensor([1.0]))
    ring.begin().copy("x", torch.tensor([2.0]))
    ring.begin().copy("x", torch.tensor([3.0]))
    assert first.tolist() == [1.0]
    ring.begin().copy("x", torch.tensor([4.0]))
    assert first.tolist() == [4.0]


def test_buffers_grow_and_change_kind():
    slot = OutputRing(torch.device("cpu"), poison=False).begin()
    assert slot.copy("x", torch.zeros(2, 3)).shape == (2, 3)
    assert slot.copy("x", torch.ones(5, 3)).tolist() == [[1.0] * 3] * 5
    assert slot.copy("x", torch.ones(1, 3)).shape == (1, 3)
    assert slot.copy("x", torch.ones(1, 3, dtype=torch.int32)).dtype == np.int32
    assert slot.copy("x", torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool])
def test_poison_changes_every_kind_of_tensor(dtype: torch.dtype):
    tensor = torch.ones(4).to(dtype)
    poison_tensor(tensor)
    assert not (tensor == torch.ones(4).to(dtype)).any()


@pytest.mark.parametrize("captured", [(), (4,)])
def test_host_rows_and_stored_tensors_survive_the_next_submit(captured: tuple[int, ...], kernels: str):
    rig = EngineRig(capture_sizes=captured)
    for handle in range(3):
        rig.open(handle, PROMPTS[handle])
    rig.prefill(0, 1, 2)
    cur = rig.arm(take("decode", [0, 1, 2]))
    rig.engine.submit(cur)
    nxt = rig.arm(take("decode", [0, 1, 2]))
    rig.engine.submit(nxt)  # with the inline executor it has run already, over the same static buffers
    rig.engine.finish(cur)
    expected = [rig.decoder.reference_greedy(PROMPTS[handle], 3) for handle in range(3)]
    assert cur.host("token").tolist() == [tokens[1] for tokens in expected]
    hidden = rig.store.gather(cur.outputs.ids_of(cur.parts[0])["hidden"])
    logits = (hidden @ rig.decoder.lm_head).argmax(-1)
    assert logits.tolist() == [tokens[1] for tokens in expected]
    rig.engine.finish(nxt)
    assert nxt.host("token").tolist() == [tokens[2] for tokens in expected]


@pytest.mark.parametrize("signal", ["token", "hidden"])
def test_the_same_reads_are_wrong_without_the_guard(signal: str):
    """What the copies are for: switched off, the next submit overwrites what this step made."""
    rig = EngineRig(capture_sizes=(4,), guard_outputs=False)
    for handle in range(3):
        rig.open(handle, PROMPTS[handle])
    rig.prefill(0, 1, 2)
    cur = rig.arm(take("decode", [0, 1, 2]))
    rig.engine.submit(cur)
    nxt = rig.arm(take("decode", [0, 1, 2]))
    rig.engine.submit(nxt)
    rig.engine.finish(cur)
    expected = [rig.decoder.reference_greedy(PROMPTS[handle], 2)[1] for handle in range(3)]
    if signal == "token":
        assert cur.host("token").tolist() != expected
    else:
        hidden = rig.store.gather(cur.outputs.ids_of(cur.parts[0])["hidden"])
        assert (hidden @ rig.decoder.lm_head).argmax(-1).tolist() != expected
