"""A resource that runs short in the middle of a request: the rows that it names wait, the others go on at once.

Reservations make this impossible for the resources that there are, so one is made to refuse.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.instance import Instance, Tuning
from support.tiny_serving import TinyLlama

from mstar.engine.execution import AdmitOutcome
from mstar.engine.resources.base import Resource
from mstar.model.llama.model import NODE


class Refusing:
    """Makes a resource of an instance refuse the rows that `short` picks from a step's draw counts by handle, at most
    `times` times. `at`: steps submitted by then, and the rows refused."""

    def __init__(self, instance: Instance, key: str, short: Callable[[dict[int, int]], list[int]], times: int) -> None:
        node = instance.parts[0].engine._nodes[NODE]
        resource: Resource = node.resources[key]
        admit = resource.admit
        self.at: list[tuple[int, list[int]]] = []

        def refusing(step, ctx, txn) -> AdmitOutcome:
            handles = ctx.rows.handles
            draws = dict(zip(handles.tolist(), node.num_draws(handles).tolist(), strict=True))
            refused = short(draws) if len(self.at) < times else []
            if refused:
                self.at.append((len(instance.steps), refused))
                return AdmitOutcome(tuple(refused), key)
            return admit(step, ctx, txn)

        resource.admit = refusing


def second_of_three(draws: dict[int, int]) -> list[int]:
    """The second row, in a step of three that have three tokens each."""
    return [list(draws)[1]] if len(draws) == 3 and set(draws.values()) == {3} else []


def first_resource_and_last(instance: Instance) -> list[str]:
    keys = list(instance.parts[0].engine._nodes[NODE].resources)
    return [keys[0], keys[-1]]


@pytest.mark.parametrize("place", [0, 1])
def test_the_row_waits_and_the_rest_goes_on_in_the_same_tick(tiny: TinyLlama, tuning: Tuning, place: int):
    """Whether others had reserved before the one that refused, or were never asked."""
    instance = tiny.instance(tuning)
    baseline = dict(instance.gauges(0))
    refusing = Refusing(instance, first_resource_and_last(instance)[place], second_of_three, times=1)
    lengths = {"long": 20, "short of room": 12, "short": 8}
    for index, (rid, length) in enumerate(lengths.items()):
        tiny.submit(instance, rid, tiny.prompt(5, index), max_tokens=length)
    while not refusing.at:
        before = len(instance.steps)
        instance.tick()
    [(num_steps, [held])] = refusing.at
    assert len(instance.steps) == num_steps + 1 == before + 1, "the rest was submitted in the tick of the refusal"
    rest = set(instance.steps[num_steps].rows)
    assert (len(rest), held in rest) == (2, False)
    instance.run()
    left = next(i for i, step in enumerate(instance.steps) if i > num_steps and held in step.rows)
    assert left - num_steps >= 8 - 4, "it waited until the shortest had gone"
    assert all(set(step.rows) == rest for step in instance.steps[num_steps : num_steps + 3])
    for index, (rid, length) in enumerate(lengths.items()):
        assert instance.results[rid].tokens == tiny.greedy(tiny.prompt(5, index), length), rid
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def test_an_abandoned_round_of_refusals_leaves_the_order_of_the_queue(tiny: TinyLlama, tuning: Tuning):
    """One row after the other is refused in one tick; the last one runs, and the others follow when it has left."""
    instance = tiny.instance(tuning)
    baseline = dict(instance.gauges(0))
    refusing = Refusing(instance, "kv", lambda draws: [min(draws)] if len(draws) > 1 else [], times=3)
    for index in range(4):
        tiny.submit(instance, f"r{index}", tiny.prompt(5, index), max_tokens=5)
    instance.tick()
    assert [len(refused) for _, refused in refusing.at] == [1, 1, 1]
    [step] = instance.steps
    assert len(step.rows) == 1
    instance.run()
    for index in range(4):
        assert instance.results[f"r{index}"].tokens == tiny.greedy(tiny.prompt(5, index), 5)
    assert dict(instance.gauges(0)) == baseline
    instance.close()


@pytest.mark.parametrize("leaver", ["held", "other"])
def test_an_abort_while_a_row_waits(tiny: TinyLlama, tuning: Tuning, leaver: str):
    instance = tiny.instance(tuning)
    baseline = dict(instance.gauges(0))
    refusing = Refusing(instance, "kv", second_of_three, times=1)
    for index in range(3):
        tiny.submit(instance, f"r{index}", tiny.prompt(5, index), max_tokens=30)
    while not refusing.at:
        instance.tick()
    [(_, [held])] = refusing.at
    names = instance.parts[0].teardown._rids
    rid = names.rid(held) if leaver == "held" else next(r for r in instance.results if names.handle(r) != held)
    num_tokens = len(instance.results[names.rid(held)].tokens)
    instance.abort(rid)
    for _ in range(8):
        instance.tick()
    if leaver == "other":
        assert len(instance.results[names.rid(held)].tokens) > num_tokens, "room was left: it goes on"
    instance.run()
    for index in range(3):
        if f"r{index}" != rid:
            assert instance.results[f"r{index}"].tokens == tiny.greedy(tiny.prompt(5, index), 30)
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def test_when_all_rows_are_refused_behind_a_step_that_one_of_them_ends_with(tiny: TinyLlama, tuning: Tuning):
    """Nobody may fail for want of room while a row in flight is about to leave some."""
    instance = tiny.instance(tuning)
    baseline = dict(instance.gauges(0))
    prompts = [tiny.prompt(5, index) for index in range(2)]
    expected = [tiny.greedy(prompt, 12) for prompt in prompts]
    stop = expected[0][5]
    length = expected[0].index(stop) + 1

    def everybody(draws: dict[int, int]) -> list[int]:
        return list(draws) if len(draws) == 2 and set(draws.values()) == {length} else []

    Refusing(instance, "kv", everybody, times=1)
    stopping = tiny.submit(instance, "stopping", prompts[0], max_tokens=12, stop_token_ids=(stop,))
    other = tiny.submit(instance, "other", prompts[1], max_tokens=12)
    instance.run()
    assert (stopping.failure, stopping.tokens) == (None, expected[0][:length])
    assert (other.failure, other.tokens) == (None, expected[1])
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def test_a_row_that_nobody_will_leave_room_for_fails(tiny: TinyLlama, tuning: Tuning):
    instance = tiny.instance(replace(tuning, max_rows=2))
    baseline = dict(instance.gauges(0))
    Refusing(instance, "kv", lambda draws: list(draws) if min(draws.values()) >= 3 else [], times=100)
    results = [tiny.submit(instance, f"r{index}", tiny.prompt(5, index), max_tokens=20) for index in range(2)]
    waiting = tiny.submit(instance, "waiting", tiny.prompt(6), max_tokens=3)
    instance.run()
    assert ["kv has no room left" in (result.failure or "") for result in results] == [True, True]
    assert waiting.tokens == tiny.greedy(tiny.prompt(6), 3)
    assert dict(instance.gauges(0)) == baseline
    instance.close()
