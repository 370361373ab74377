"""A tensor of 1 MiB from one worker's node to another's: through shared memory, which is as before afterwards, also
when one of the two is killed on the way. Between processes, by a real signal: `test_transport_processes.py`."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.instance import Instance, Tuning, shared_memory_of

from mstar.communication.arena import SHM_DIR
from mstar.engine.submodule import EngineInputs, NodeOutputs, NodeSubmodule
from mstar.graph.base import EMIT_TO_CLIENT, GraphEdge, GraphNode, Sequential, Walks
from mstar.model.base import Model, ModelSetup, PartitionPlan, PreparedPrompt, PromptRequest, WalkPlan
from mstar.streaming.topology import Partition, PartitionTopology

NUM_FLOATS = (1 << 20) // 4
MANY = (4, 5, 6, 7, 8, 9)


class BulkModel(Model):
    """MAKER turns a number into 1 MiB; MEASURE, on the other worker, emits three numbers about it."""

    def walks(self) -> Walks:
        maker = GraphNode("MAKER", ("start",), (GraphEdge("MEASURE", "bulk"),))
        measure = GraphNode("MEASURE", ("bulk",), (GraphEdge(EMIT_TO_CLIENT, "found", output_modality="audio"),))
        return {"once": Sequential((maker, measure))}

    def partitions(self) -> PartitionTopology:
        return PartitionTopology((Partition("main", ("once",), request_inputs=("start",)),))

    def get_node_resources(self) -> tuple[()]:
        return ()

    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        return PreparedPrompt(None, request.inputs)

    def plan_walks(self, prompt: PreparedPrompt, max_tokens: int) -> WalkPlan:
        return WalkPlan((PartitionPlan("main", ("once",)),), {})


class Maker(NodeSubmodule):
    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {"bulk": inputs.tensors["start"] + torch.arange(NUM_FLOATS) % 1000}


class Measure(NodeSubmodule):
    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        bulk = inputs.tensors["bulk"]
        return {"found": torch.stack([bulk[:, 0], bulk[:, -1], bulk.double().sum(1).float()], 1)}


def found(start: float) -> list[float]:
    whole = start + np.arange(NUM_FLOATS) % 1000
    return [float(whole[0]), float(whole[-1]), float(np.float32(whole.sum()))]


@pytest.fixture
def instance() -> Iterator[Instance]:
    nodes = {"MAKER": Maker, "MEASURE": Measure}
    made = Instance(
        BulkModel(ModelSetup({}, None, 64)), lambda name: nodes[name](), {"MAKER": 0, "MEASURE": 1}, Tuning()
    )
    made.tick()
    yield made
    made.close()
    assert shared_memory_of(made.name) == []


def shm_bytes(instance: Instance) -> int:
    return sum((SHM_DIR / name).stat().st_blocks * 512 for name in shared_memory_of(instance.name))


def used_bytes(instance: Instance) -> int:
    """Of the first worker's arena, for tensors that are under way."""
    arena = instance.parts[0].inbox._transport._arena
    assert arena is not None
    return arena.num_used_bytes


def submit(instance: Instance, *starts: int) -> None:
    for start in starts:
        instance.submit(f"r{start}", PreparedPrompt(None, {"start": np.array([start], np.float32)}))


def send_and_stop(instance: Instance, *starts: int) -> None:
    """The tensors are in shared memory; the messages about them are under way."""
    instance.net.hold("w0", "w1")
    submit(instance, *starts)
    while ("w0", "w1") not in instance.net.pending():
        instance.tick()
    for _ in range(3):
        instance.tick()


def check(instance: Instance, *starts: int) -> None:
    for start in starts:
        assert [values.tolist() for values in instance.results[f"r{start}"].tensors["found"]] == [found(start)]


def test_1_mib_crosses_with_messages_under_4_kib_and_leaves_nothing(instance: Instance):
    baseline = shm_bytes(instance)
    submit(instance, 3)
    instance.run()
    check(instance, 3)
    send_and_stop(instance, *MANY)
    assert used_bytes(instance) >= len(MANY) << 20
    assert shm_bytes(instance) > baseline, "more than fits into what is always there"
    instance.net.unhold()
    instance.run()
    check(instance, *MANY)
    assert max(len(step.rows) for step in instance.steps) == len(MANY)
    assert used_bytes(instance) == 0
    assert max(parts.bus.counters.largest_frame_bytes for parts in instance.parts) < 4096
    assert [instance.gauges(rank)["mstar_tensors"] for rank in (0, 1)] == [0, 0]
    assert shm_bytes(instance) == baseline


@pytest.mark.parametrize("victim", [0, 1])
def test_shared_memory_is_as_before_when_one_of_the_two_is_killed_on_the_way(instance: Instance, victim: int):
    submit(instance, 3)
    instance.run()
    each = shm_bytes(instance) // 2
    send_and_stop(instance, *MANY)
    assert shm_bytes(instance) > 2 * each
    instance.lose(victim)
    instance.net.unhold()
    for _ in range(5):
        instance.tick()
    assert all(instance.results[f"r{start}"].failure for start in MANY)
    survivor = 1 - victim
    gauges = instance.gauges(survivor)
    assert (gauges["mstar_handles"], gauges["mstar_tensors"]) == (0, 0)
    assert shm_bytes(instance) == each, "what is left is the survivor's, as large as before"
    instance.restart(victim)
    submit(instance, 17)
    instance.run()
    check(instance, 17)
    assert shm_bytes(instance) == 2 * each
