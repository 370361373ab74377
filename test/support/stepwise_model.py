"""A model that decides each walk after the last one, over two workers: `think` on one, `speak` on both. No torch.

`process_prompt` does what its text says, so that a pool can be tested with a model that misbehaves.
"""

import os
import signal
from collections.abc import Sequence

import numpy as np

from mstar.graph.base import EMIT_TO_CLIENT, EMPTY_DESTINATION, GraphEdge, GraphNode, Sequential, Walks
from mstar.model.base import (
    Done,
    Model,
    ModelCard,
    PartitionState,
    PreparedPrompt,
    PromptRequest,
    WalkStep,
)
from mstar.streaming.topology import Partition, PartitionTopology

CARD = ModelCard(name="stepwise", model="support.stepwise_model:StepwiseModel", submodules="")
PLACEMENT = {"THINKER": 0, "SPEAKER": 1}


class StepwiseModel(Model):
    """Runs `think` as often as `step_metadata["thoughts"]` says (once without), then `speak`."""

    def walks(self) -> Walks:
        thought = GraphEdge(EMPTY_DESTINATION, "thought", persist=True)
        word = GraphEdge(EMIT_TO_CLIENT, "word", output_modality="text")
        return {
            "think": GraphNode("THINKER", (), (thought,)),
            "speak": Sequential(
                (
                    GraphNode("THINKER", ("thought",), (GraphEdge("SPEAKER", "idea"),)),
                    GraphNode("SPEAKER", ("idea",), (word,)),
                )
            ),
        }

    def partitions(self) -> PartitionTopology:
        return PartitionTopology((Partition("main", ("think", "speak")),))

    def get_node_resources(self) -> Sequence[object]:
        return ()

    def plan_walks(self, prompt: PreparedPrompt, max_tokens: int) -> None:
        return None

    def next_walk(self, partition: str, state: PartitionState) -> WalkStep | Done:
        if "speak" in state.walks_done:
            return Done()
        is_thinking = len(state.walks_done) < int(state.step_metadata.get("thoughts", 1))
        return WalkStep("think" if is_thinking else "speak")

    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        match request.text:
            case "refuse":
                raise ValueError("this text is refused\nin two lines")
            case "bug":
                raise KeyError("a bug")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.pause()
            case "pid":
                return PreparedPrompt(np.array([os.getpid()], np.int32))
            case "threads":
                return PreparedPrompt(np.array([int(os.environ["OMP_NUM_THREADS"])], np.int32))
        ids = np.frombuffer((request.text or "").encode(), np.uint8).astype(np.int32)
        return PreparedPrompt(
            ids,
            inputs={name: array * 2 for name, array in request.inputs.items()},
            step_metadata={"roles": ",".join(m.role for m in request.messages), "most": request.max_tokens},
        )
