"""Which nodes' steps are measured before the first request, and what a worker's log says about them: whoever reads it
can work the numbers out again."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.step_cost import StepCost
from mstar.engine.step_timing import DecodeWalk
from mstar.graph.base import EMIT_TO_CLIENT, EMPTY_DESTINATION, GraphEdge, GraphNode, Loop, LoopLimit
from mstar.graph.compile import compile_walks
from mstar.graph.protocol import ReadyKey
from mstar.launch.calibration import _measurable, describe_cost
from mstar.streaming.topology import Partition, PartitionTopology

COST = StepCost(base_s=0.0051, token_s=0.00025, context_s=0.0, pair_s=0.0, decode_base_s=0.010, decode_row_s=0.001)
POLICIES = {"prefill": ChunkingPolicy(chunked=True), "decode": ChunkingPolicy(batch_with=("prefill",))}


def test_the_numbers_of_a_steps_cost_follow_from_each_other():
    """(100 - 5.1) / 0.25 = 379.6 alone; beside 8 streams (2.5 · 18 - 5.1 - 8 · 0.25) / 0.25 = 151.6."""
    assert describe_cost("LLM", COST, 2048) == (
        "LLM: 8 streams decode in 18 ms; a step with prompts takes 5.1 ms and 0.25 ms for each token; "
        "it computes 379 prompt tokens, 151 beside 8 streams"
    )


def test_what_earlier_tokens_add_is_said_where_it_was_measured():
    said = describe_cost("LLM", replace(COST, pair_s=1e-6), 2048)
    assert "0.25 ms for each token, 1.02 ms more for each 1,024 before it; it" in said
    said = describe_cost("LLM", replace(COST, pair_s=1e-6, context_s=2e-6), 2048)
    assert "1.02 ms more for each 1,024 before it, and 2.05 ms for each 1,024 before a chunk; it" in said


@pytest.mark.parametrize("inputs", ["none", "optional", "required"])
def test_a_walk_whose_inputs_may_all_be_absent_can_be_run_alone(inputs: str):
    features = GraphEdge(EMPTY_DESTINATION, "features", persist=True)
    emit = GraphEdge(EMIT_TO_CLIENT, "token", output_modality="text")
    first = GraphEdge(EMPTY_DESTINATION, "token", persist=True)
    taken = () if inputs == "none" else ("features",)
    optional = frozenset(taken if inputs == "optional" else ())
    again = GraphNode("LLM", ("token",), (GraphEdge("LLM", "token"), emit))
    walks: dict[str, Any] = {
        "prefill": GraphNode("LLM", taken, (first, emit), optional_inputs=optional),
        "decode": Loop(again, LoopLimit("steps"), name="decode"),
    }
    if taken:
        walks["encode"] = GraphNode("EYE", ("pixels",), (features,))
    partition = Partition("text", tuple(walks), request_inputs=("pixels",) if taken else ())
    compiled = compile_walks(walks, PartitionTopology((partition,)), dict.fromkeys(("LLM", "EYE")[: 1 + len(taken)], 0))
    engine = SimpleNamespace(policy=lambda node, walk: POLICIES.get(walk, ChunkingPolicy()))
    found = _measurable(compiled, 0, SimpleNamespace(engine=engine))  # type: ignore[arg-type]
    decode = DecodeWalk(ReadyKey("LLM", "decode"), frozenset({"token"}))
    assert found == ([] if inputs == "required" else [(ReadyKey("LLM", "prefill"), decode)])
