"""A model's node that breaks its contract fails the rows of its step; the worker and later requests go on."""

import numpy as np
import pytest
import torch
from support.instance import Instance

from mstar.engine.submodule import NodeSubmodule, StopDecision


class Breaks:
    """Whether the node is broken now, and from which step of decode on."""

    def __init__(self) -> None:
        self.now = True


def can_batch_raises(node: NodeSubmodule, breaks: Breaks) -> None:
    def can_batch(self, walk, shapes):
        if breaks.now:
            raise RuntimeError("broken on purpose")
        return True

    node.__class__ = type("Batching", (type(node),), {"can_batch": can_batch})


def check_stop_raises(node: NodeSubmodule, breaks: Breaks) -> None:
    original = node.check_stop

    def check_stop(walk, rows, host):
        if breaks.now and walk == "decode" and (rows.num_draws == 3).any():
            raise RuntimeError("broken on purpose")
        return original(walk, rows, host)

    node.check_stop = check_stop


def _stops_with(node: NodeSubmodule, breaks: Breaks, decision: StopDecision) -> None:
    original = node.check_stop
    node.check_stop = lambda *asked: [decision] if breaks.now else original(*asked)


def stops_an_unknown_loop(node: NodeSubmodule, breaks: Breaks) -> None:
    _stops_with(node, breaks, StopDecision(np.array([0, 1, 2]), "nowhere", finish=False))


def stops_a_row_that_is_not_there(node: NodeSubmodule, breaks: Breaks) -> None:
    _stops_with(node, breaks, StopDecision(np.array([99]), "decode", finish=True))


def makes_an_undeclared_output(node: NodeSubmodule, breaks: Breaks) -> None:
    original = node.forward_batched

    def forward(walk, inputs):
        outputs = original(walk, inputs)
        return {**outputs, "stranger": torch.zeros(inputs.num_rows)} if breaks.now else outputs

    node.forward_batched = forward


BROKEN = {
    can_batch_raises: "can_batch of walk 'prefill' raised RuntimeError: broken on purpose",
    check_stop_raises: "check_stop of walk 'decode' raised RuntimeError: broken on purpose",
    stops_an_unknown_loop: "there is no loop 'nowhere'",
    stops_a_row_that_is_not_there: "positions [99] in a part of 3 rows",
    makes_an_undeclared_output: "outputs ['stranger'] are not declared",
}


@pytest.mark.parametrize("breaking", BROKEN)
def test_the_rows_of_the_step_fail_and_the_next_request_is_served(tiny, tuning, breaking):
    node, breaks = tiny.build_node(), Breaks()
    breaking(node, breaks)
    instance = tiny.instance(tuning, node)
    baseline = dict(instance.gauges(0))
    for index in range(3):
        tiny.submit(instance, f"r{index}", tiny.prompt(5, index), max_tokens=8)
    instance.run()
    for index in range(3):
        assert BROKEN[breaking] in (instance.results[f"r{index}"].failure or "")
    breaks.now = False
    after = tiny.submit(instance, "after", tiny.prompt(9), max_tokens=8)
    instance.run()
    assert after.tokens == tiny.greedy(tiny.prompt(9), 8)
    _assert_nothing_is_held(instance)
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def _assert_nothing_is_held(instance: Instance) -> None:
    [parts] = instance.parts
    assert all(node.staging.num_in_use == 0 for node in parts.engine._nodes.values())
    assert parts.inbox.leaving == []
    assert not parts.inbox._requests.in_steps.any()
