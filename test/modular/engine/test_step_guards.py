"""A resource that raises in a stage of a step fails that step's rows, by name; everything else goes on as if the step
had never been."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.engine_rig import EngineRig, portion, prompts, take

from mstar.engine.execution import Step
from mstar.engine.transaction import Transaction

PROMPTS = prompts(6, seed=13)
KEYS = ["kv", "attn", "rope", "sampler"]


def raises(*_: Any, **__: Any) -> Any:
    raise LookupError("no such page")


def ready_rig() -> EngineRig:
    rig = EngineRig(prefix_cache=False)
    for handle in range(4):
        rig.open(handle, PROMPTS[handle])
    rig.prefill(0, 1, 2)
    return rig


def others_go_on(rig: EngineRig) -> None:
    """The failed rows leave, the others are what they would have been."""
    for handle in (1, 2):
        rig.engine.memory.close(handle)
        del rig.out[handle]
    rig.run(take("decode", [0]), take("prefill", [3]))
    rig.decode(3, 0)
    assert rig.out[0] == rig.decoder.reference_greedy(PROMPTS[0], len(rig.out[0]))
    assert rig.out[3] == rig.decoder.reference_greedy(PROMPTS[3], 2)
    rig.close_all()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("stage", ["admit", "plan", "advance"])
def test_before_the_forward(monkeypatch: pytest.MonkeyPatch, stage: str, key: str):
    rig = ready_rig()
    with monkeypatch.context() as patch:
        patch.setattr(rig.resource(key), stage, raises)
        step, _ = rig.engine.build([take("decode", [1, 2])])
        assert step is not None
        assert rig.engine.admit(step).ok  # nobody was refused: nothing to wait for
        rig.engine.plan(step)
    assert step.failed == dict.fromkeys([1, 2], f"{stage} of resource '{key}' raised LookupError: no such page")
    assert step.txn is None
    with pytest.raises(RuntimeError):
        rig.engine.submit(step)
    rig.check()
    others_go_on(rig)


def test_in_the_middle_of_admission(monkeypatch: pytest.MonkeyPatch):
    """What earlier resources have reserved goes back."""
    rig = ready_rig()
    free = rig.kv.arena.num_free
    long = [int(rig.kv.lengths[handle]) for handle in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(rig.sampler, "admit", raises)
        step, _ = rig.engine.build([take("decode", [1]), portion("prefill", {3: 4})])
        assert step is not None and rig.engine.admit(step).ok
    assert step.failed.keys() == {1, 3}
    assert rig.kv.arena.num_free == free
    assert [int(rig.kv.lengths[handle]) for handle in range(4)] == long
    step, _ = rig.engine.build([take("decode", [1])])
    assert step is not None and rig.engine.admit(step).ok and not step.failed
    rig.engine.abandon(step)


@pytest.mark.parametrize(("stage", "key"), [*(("settle", key) for key in KEYS), ("publish", "kv")])
def test_behind_the_forward(monkeypatch: pytest.MonkeyPatch, stage: str, key: str):
    rig = ready_rig()
    other = rig.arm(take("decode", [0]))
    rig.engine.submit(other)
    step = rig.arm(take("decode", [1, 2]))
    rig.engine.submit(step)
    rig.end(other)
    with monkeypatch.context() as patch:
        patch.setattr(rig.resource(key), stage, raises)
        rig.end(step)
    assert step.failed == dict.fromkeys([1, 2], f"{stage} of resource '{key}' raised LookupError: no such page")
    others_go_on(rig)


def test_publishing_fails_only_what_was_kept(monkeypatch: pytest.MonkeyPatch):
    rig = ready_rig()
    step = rig.arm(take("decode", [0, 1, 2]))
    rig.engine.submit(step)
    rig.engine.finish(step)
    monkeypatch.setattr(rig.kv, "publish", raises)
    rig.engine.publish(step, np.array([True, False, True]))
    assert step.failed.keys() == {0, 2}
    ids = step.outputs.ids["hidden"]
    assert ids is not None and rig.store.num_live == 2  # the unwanted output has left all the same


@pytest.mark.parametrize("stage", ["admit", "plan"])
def test_a_process_that_is_to_end_is_not_held_up(monkeypatch: pytest.MonkeyPatch, stage: str):
    rig = ready_rig()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.kv, stage, interrupted)
    step, _ = rig.engine.build([take("decode", [0])])
    assert step is not None

    def run(step: Step) -> None:
        rig.engine.admit(step)
        rig.engine.plan(step)

    with pytest.raises(KeyboardInterrupt):
        run(step)


def test_a_refusal_is_not_a_failure(monkeypatch: pytest.MonkeyPatch):
    rig = ready_rig()
    admit: Callable[..., Any] = rig.kv.admit

    def refusing(step: Any, ctx: Any, txn: Transaction) -> Any:
        return admit(step, ctx, txn)._replace(refused=(1,), resource="kv", missing=1)

    monkeypatch.setattr(rig.kv, "admit", refusing)
    step, _ = rig.engine.build([take("decode", [0, 1])])
    assert step is not None
    outcome = rig.engine.admit(step)
    assert not outcome.ok and outcome.refused == (1,) and not step.failed
