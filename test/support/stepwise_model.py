"""A model that decides each walk after the last one, over two workers: `think` on one, `speak` on both. No torch; its
nodes are in `stepwise_nodes.py`.

`process_prompt` does what its text says, so that a pool can be tested with a model that misbehaves.
"""

import os
import signal
from collections.abc import Sequence

import numpy as np

from mstar.graph.base import (
    EMIT_TO_CLIENT,
    EMPTY_DESTINATION,
    GraphEdge,
    GraphNode,
    Loop,
    LoopLimit,
    Sequential,
    Walks,
)
from mstar.model.base import (
    Done,
    Model,
    ModelCard,
    PartitionState,
    PreparedPrompt,
    PromptRequest,
    PromptTooLongError,
    WalkStep,
)
from mstar.streaming.chunk_policy import fixed
from mstar.streaming.topology import Connection, Partition, PartitionTopology

CARD = ModelCard(
    name="stepwise",
    model="support.stepwise_model:StepwiseModel",
    submodules="support.stepwise_nodes:build_submodule",
)
PLACEMENT = {"THINKER": 0, "SPEAKER": 1}
SINGING_PLACEMENT = {**PLACEMENT, "SINGER": 0}


class StepwiseModel(Model):
    """Runs `think` as often as `step_metadata["thoughts"]` says (once without), then `speak`, whose loop has as many
    iterations as `step_metadata["words"]` says (one without)."""

    def walks(self) -> Walks:
        thought = GraphEdge(EMPTY_DESTINATION, "thought", persist=True)
        return {
            "think": GraphNode(
                "THINKER", ("topic", "thought"), (thought,), optional_inputs=frozenset({"topic", "thought"})
            ),
            "speak": Sequential(
                (
                    GraphNode("THINKER", ("thought",), (GraphEdge("SPEAKER", "idea"),)),
                    Loop(GraphNode("SPEAKER", ("idea",), self._said()), LoopLimit("words"), name="words"),
                )
            ),
        }

    def _said(self) -> tuple[GraphEdge, ...]:
        return (GraphEdge(EMIT_TO_CLIENT, "word", output_modality="text"),)

    def partitions(self) -> PartitionTopology:
        return PartitionTopology((Partition("main", ("think", "speak"), request_inputs=("topic",)),))

    def get_node_resources(self) -> Sequence[object]:
        return ()

    def plan_walks(self, prompt: PreparedPrompt, max_tokens: int) -> None:
        return None

    def next_walk(self, partition: str, state: PartitionState) -> WalkStep | Done:
        if "speak" in state.walks_done:
            return Done()
        is_thinking = len(state.walks_done) < int(state.step_metadata.get("thoughts", 1))
        if is_thinking:
            return WalkStep("think")
        return WalkStep("speak", {"words": int(state.step_metadata.get("words", 1))})

    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        match request.text:
            case "refuse":
                raise ValueError("this text is refused\nin two lines")
            case "too long":
                raise PromptTooLongError("5 tokens, more than the context of 4")
            case "bug":
                raise KeyError("a bug")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.pause()
            case "loop":
                while True:
                    pass
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


class SingingModel(StepwiseModel):
    """Its words are also streamed, two at a time, to a partition on another worker. Nobody knows up front which walk is
    the last, so the stream ends when the model says that it is done."""

    def walks(self) -> Walks:
        song = GraphEdge(EMIT_TO_CLIENT, "song", output_modality="audio")
        return {**super().walks(), "sing": GraphNode("SINGER", ("word",), (song,))}

    def _said(self) -> tuple[GraphEdge, ...]:
        return (*super()._said(), GraphEdge("SINGER", "word", target_partition="choir"))

    def partitions(self) -> PartitionTopology:
        choir = Partition("choir", ("sing",), stream_fed=True)
        connection = Connection("main", "choir", "SINGER", "word", fixed(2), "sing")
        return PartitionTopology((*super().partitions().partitions, choir), (connection,))
