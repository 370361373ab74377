"""Nodes whose steps have room for some of the rows only: the others wait, in the order in which they came."""

import numpy as np
import pytest
from support.composite.declarations import ENCODER, FLOW
from support.composite.deployment import Composite, make_requests
from support.instance import Tuning

from mstar.engine.submodule import NodeBatch, NodeSubmodule

REQUESTS = make_requests(8)
TUNINGS = {"plain": Tuning(overlap=False), "overlap": Tuning(), "late": Tuning(late=True)}


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


def with_room_for(node: NodeSubmodule, most: int) -> NodeSubmodule:
    original = node.prepare_batch

    def prepare_batch(walk, rows):
        batch = original(walk, rows)
        if len(rows.handles) <= most:
            return batch
        spans = np.full(len(rows.handles), -1, np.int32)
        spans[:most] = 0 if batch is None else batch.spans[:most]
        return NodeBatch(spans, None if batch is None else batch.token_ids)

    node.prepare_batch = prepare_batch
    return node


@pytest.mark.parametrize(("node", "most"), [(ENCODER, 1), (FLOW, 1)])
@pytest.mark.parametrize("tuning", TUNINGS)
def test_rows_wait_for_room(composite: Composite, monkeypatch, node: str, most: int, tuning: str) -> None:
    """A node outside loops, and one in a loop."""
    build = composite.build_node
    monkeypatch.setattr(composite, "build_node", lambda name: with_room_for(build(name), most if name == node else 16))
    placement = "three_workers_encoder_alone" if node == ENCODER else "one_worker"
    instance = composite.instance(placement, TUNINGS[tuning])
    for index, request in enumerate(REQUESTS):
        composite.submit(instance, f"r{index}", request)
    instance.run()
    for index, request in enumerate(REQUESTS):
        composite.check(instance, f"r{index}", request)
    assert max(len(step.rows) for step in instance.steps if step.node == node) == most
    encoded = [row for step in instance.steps if step.node == ENCODER for row in step.rows]
    assert len(encoded) == len(REQUESTS)
    instance.close()


def test_a_node_without_room_for_anybody_fails_its_rows(composite: Composite, monkeypatch) -> None:
    build = composite.build_node
    room = {ENCODER: 0}
    monkeypatch.setattr(composite, "build_node", lambda name: with_room_for(build(name), room.get(name, 16)))
    instance = composite.instance("one_worker", Tuning())
    for index, request in enumerate(REQUESTS[:3]):
        composite.submit(instance, f"r{index}", request)
    instance.run()
    for index in range(3):
        assert "declined a step whose inputs were all there" in (instance.results[f"r{index}"].failure or "")
    instance.close()
