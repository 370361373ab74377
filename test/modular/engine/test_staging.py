"""The staging block: layout, padding, ring, and that planning touches nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine_rig import EngineRig, prompts, take

from mstar.engine.resources.base import StepContext
from mstar.engine.staging import (
    DeviceBlock,
    LayoutCache,
    StagingField,
    StagingRing,
    StagingSlot,
    StepShape,
    fill_padding,
    narrow_staging,
)

CPU = torch.device("cpu")
FIELDS = (
    StagingField("a", "int32", "row", 7),
    StagingField("b", "int64", "token", -3),
    StagingField("c", "float32", "row", 0.5, lambda shape: shape.pages),
    StagingField("d", "int32", "border"),
)


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 5), st.integers(0, 8))
def test_what_is_written_arrives_and_padding_is_filled(rows: int, tokens: int, pages: int, real: int):
    layout = LayoutCache(FIELDS).layout(StepShape(rows, tokens, pages))
    slot, block = StagingSlot(pinned=False), DeviceBlock(CPU)
    views = slot.views(layout)
    slot.data.fill_(0xEE)
    real_rows, real_tokens = min(real, rows), min(real * 3, tokens)
    fill_padding(layout, views, real_rows, real_tokens)
    generator = np.random.default_rng(0)
    expected = {}
    for name, view in views.items():
        part = view if name == "d" else view[: real_tokens if name == "b" else real_rows]
        part[...] = generator.integers(-1000, 1000, part.shape)
        expected[name] = view.copy()
    staged = block.upload(slot, layout)
    slot.data.fill_(0)  # the device side is a copy
    assert {name: tuple(t.shape) for name, t in staged.items()} == {
        "a": (rows,), "b": (tokens,), "c": (rows, pages), "d": (rows + 1,)
    }  # fmt: skip
    for name, tensor in staged.items():
        assert np.array_equal(tensor.numpy(), expected[name])
        assert tensor.data_ptr() % 8 == 0
    assert (staged["a"][real_rows:] == 7).all() and (staged["b"][real_tokens:] == -3).all()
    assert (staged["c"][real_rows:] == 0.5).all()


def test_a_slot_grows_and_shapes_repeat_without_new_views():
    layouts, slot = LayoutCache(FIELDS), StagingSlot(pinned=False)
    small = slot.views(layouts.layout(StepShape(2, 2, 1)))
    assert slot.views(layouts.layout(StepShape(2, 2, 1))) is small
    big = slot.views(layouts.layout(StepShape(50, 90, 4)))
    big["b"][:] = 5
    assert (slot.views(layouts.layout(StepShape(50, 90, 4)))["b"] == 5).all()


def test_the_ring_gives_a_slot_to_one_step_at_a_time():
    ring = StagingRing(CPU)
    slots = [ring.acquire() for _ in range(3)]
    assert len({id(slot) for slot in slots}) == 3
    with pytest.raises(RuntimeError, match="3 steps"):
        ring.acquire()
    ring.release(slots[1])
    with pytest.raises(RuntimeError, match="exactly once"):
        ring.release(slots[1])
    assert ring.acquire() is slots[1]


def test_equal_field_names_are_refused():
    with pytest.raises(ValueError, match="share a name"):
        LayoutCache((FIELDS[0], FIELDS[0]))


def test_a_piece_of_a_step_counts_its_tokens_from_zero():
    layout = LayoutCache(FIELDS).layout(StepShape(3, 6, 1))
    slot = StagingSlot(pinned=False)
    views = slot.views(layout)
    views["a"][:], views["b"][:], views["c"][:] = [0, 1, 2], range(6), 1.0
    views["d"][:] = [0, 1, 4, 6]
    piece = narrow_staging(FIELDS, DeviceBlock(CPU).upload(slot, layout), slice(1, 3), slice(1, 6))
    assert {name: tensor.flatten().tolist() for name, tensor in piece.items()} == {
        "a": [1, 2], "b": [1, 2, 3, 4, 5], "c": [1.0, 1.0], "d": [0, 3, 5]
    }  # fmt: skip


@pytest.mark.parametrize("double_buffer", [False, True])
def test_planning_may_not_touch_the_device(monkeypatch: pytest.MonkeyPatch, double_buffer: bool):
    """A plan that writes a device buffer races with the step before; the guard sees any torch operation in it."""
    rig = EngineRig()
    rig.open(0, prompts(1)[0])
    own, plan = torch.zeros(1, dtype=torch.int64), rig.sampler.plan

    def copying(step: object, ctx: StepContext) -> object:
        own.copy_(torch.from_numpy(ctx.rows.handles))
        return plan(step, ctx)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.sampler, "plan", copying)
    monkeypatch.setattr(rig.sampler, "force_double_buffer", double_buffer)
    step, _ = rig.engine.build([take("prefill", [0])])
    assert step is not None and rig.engine.admit(step).ok
    if double_buffer:
        rig.engine.plan(step)
    else:
        rig.engine.plan(step)
        assert "'sampler' ran aten" in step.failed[0]
        rig.check()


def test_a_running_step_does_not_see_what_is_planned_meanwhile():
    """Every field of the next step is written while this one is queued; the executor must read its own slot."""
    rig = EngineRig()
    texts = prompts(6, seed=4)
    for handle, text in enumerate(texts):
        rig.open(handle, text)
    rig.prefill(*range(6))
    queued: list = []
    rig.engine._executor = type("Later", (), {"submit": lambda self, work: queued.append(work)})()
    cur = rig.arm(take("decode", [0, 1, 2]))
    rig.engine.submit(cur)
    nxt = rig.arm(take("decode", [5, 4, 3]))
    rig.engine.submit(nxt)
    for step, work in zip((cur, nxt), queued, strict=True):
        step.event = rig.executor.submit(work)
    rig.end(cur)
    rig.end(nxt)
    for handle, text in enumerate(texts):
        assert rig.out[handle] == rig.decoder.reference_greedy(text, 2)
