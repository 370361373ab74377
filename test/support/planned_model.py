"""The stepwise model's thoughts under a plan that each request brings along; they are said on another worker, or not.
No torch.
"""

import numpy as np
from support.stepwise_model import CARD, StepwiseModel

from mstar.graph.base import EMIT_TO_CLIENT, EMPTY_DESTINATION, GraphEdge, GraphNode, Walks
from mstar.model.base import PartitionPlan, PreparedPrompt, WalkPlan

PLACEMENT = {"THINKER": 0, "SPEAKER": 1}


def prompt(topic: int, *walks: str) -> PreparedPrompt:
    """Walks, as they follow each other: `think` as often as wanted, then `speak` or not."""
    return PreparedPrompt(None, {"topic": np.array([topic], np.float32)}, {"walks": ",".join(walks)})


class PlannedModel(StepwiseModel):
    """`think` keeps its thought for the next `think`, and for `speak` on the other worker."""

    card = CARD

    def walks(self) -> Walks:
        kept = GraphEdge(EMPTY_DESTINATION, "thought", persist=True)
        said = GraphEdge(EMIT_TO_CLIENT, "word", output_modality="text")
        return {
            "think": GraphNode(
                "THINKER", ("topic", "thought"), (kept,), optional_inputs=frozenset({"topic", "thought"})
            ),
            "speak": GraphNode("SPEAKER", ("thought",), (said,)),
        }

    def plan_walks(self, prompt: PreparedPrompt, max_tokens: int) -> WalkPlan:
        return WalkPlan((PartitionPlan("main", tuple(str(prompt.step_metadata["walks"]).split(","))),), {})
