"""Declarations of the tiny composite model: two partitions, five walks, a nested loop, a stream. No torch."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support.composite.declarations import AUDIO, CODEC, CODES, ENCODER, FLOW, FRAME, LLM, MAIN, MEDIA_TOKEN

from mstar.communication.messages import MediaSpan
from mstar.engine.spec import AttentionSpec, NodeResourceSpec, PagedKVSpec, RotarySpec, SamplerSpec
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
from mstar.model.base import Model, ModelCard, PartitionPlan, PreparedPrompt, PromptRequest, WalkPlan
from mstar.streaming.chunk_policy import sliding
from mstar.streaming.topology import Connection, Partition, PartitionTopology

CARD = ModelCard(
    name="tiny_composite",
    model="support.composite.model:CompositeModel",
    submodules="support.composite.submodules:build_submodule",
    architectures=("TinyComposite",),
    modalities_in=("text", "image"),
    modalities_out=("text", "image", "audio"),
)

ROWS_PER_TOKEN = 2
"""Rows of media that one feature is made from."""


def _persist(name: str) -> GraphEdge:
    return GraphEdge(EMPTY_DESTINATION, name, persist=True)


def _emit(name: str, modality: str) -> GraphEdge:
    return GraphEdge(EMIT_TO_CLIENT, name, output_modality=modality)


class CompositeModel(Model):
    """See `reference.py` for what it computes; the sizes come from the checkpoint's configuration."""

    def walks(self) -> Walks:
        to_codec = GraphEdge(CODEC, "frame", target_partition=AUDIO)
        codes = Loop(
            GraphNode(
                CODES,
                ("hidden", "code"),
                (GraphEdge(CODES, "code"), GraphEdge(EMPTY_DESTINATION, "entry")),
                optional_inputs=frozenset({"code"}),
            ),
            self._size("num_codes"),
            outputs=(GraphEdge(FRAME, "entry"),),
            name="codes",
            accumulated_outputs=frozenset({"entry"}),
        )
        speak = Sequential(
            (
                GraphNode(
                    LLM,
                    ("token", "frame"),
                    (
                        GraphEdge(LLM, "token"),
                        _emit("token", "text"),
                        GraphEdge(CODES, "hidden"),
                        GraphEdge(EMPTY_DESTINATION, "hidden"),
                    ),
                ),
                codes,
                GraphNode(FRAME, ("entry",), (GraphEdge(LLM, "frame"), to_codec)),
            )
        )
        flow = GraphNode(
            FLOW, ("latent", "features", "hidden"), (GraphEdge(FLOW, "latent"),), enable_async_scheduling=False
        )
        codec = GraphNode(CODEC, ("frame",), (_emit("audio", "audio"),))
        return {
            "prefill": Sequential(
                (
                    GraphNode(ENCODER, ("media",), (GraphEdge(LLM, "features"), _persist("features"))),
                    GraphNode(
                        LLM,
                        ("features",),
                        (
                            _persist("token"),
                            _emit("token", "text"),
                            _persist("hidden"),
                            _persist("frame"),
                            to_codec,
                        ),
                    ),
                )
            ),
            "speak": Loop(speak, LoopLimit("speak_steps"), outputs=(_persist("hidden"),), name="speak"),
            "paint": Loop(flow, self._size("num_flow_steps"), outputs=(_emit("latent", "image"),), name="paint"),
            "prime": codec,
            "voice": codec,
        }

    def partitions(self) -> PartitionTopology:
        policy = sliding(self._size("window"), self._size("stride"))
        consumer_walk = (("prefill", "prime"), ("speak", "voice"))
        return PartitionTopology(
            (
                Partition(MAIN, ("prefill", "speak", "paint"), request_inputs=("media", "latent")),
                Partition(AUDIO, ("prime", "voice"), stream_fed=True),
            ),
            (Connection(MAIN, AUDIO, CODEC, "frame", policy, consumer_walk, credit=self._size("stream_credit")),),
        )

    def get_node_resources(self) -> Sequence[NodeResourceSpec]:
        size = self._size
        rope = RotarySpec("rope", "kv", rotary_dim=size("head_dim"), theta=self.setup.config["rope_theta"])
        return (
            NodeResourceSpec(
                LLM,
                (
                    PagedKVSpec("kv", size("num_layers"), size("num_kv_heads"), size("head_dim"), page_size=16),
                    AttentionSpec("attn", "kv", size("num_heads")),
                    rope,
                    SamplerSpec("sampler", size("vocab_size")),
                ),
            ),
            NodeResourceSpec(
                CODES, (SamplerSpec("code_sampler", size("code_vocab"), samples_text=False, draws_in_forward=True),)
            ),
        )

    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        """Prompt ids with a place for each feature in front. `inputs` has fp32 `media [2 n, media_width]`, n > 0, and
        `latent [latent_rows, latent_width]`."""
        media = _floats(request.inputs, "media")
        latent = _floats(request.inputs, "latent")
        if media.ndim != 2 or media.shape[1] != self._size("media_width") or len(media) == 0 or len(media) % 2:
            raise ValueError(
                f"media has shape {media.shape}; it takes an even number of rows of {self._size('media_width')}"
            )
        if latent.shape != (self._size("latent_rows"), self._size("latent_width")):
            raise ValueError(f"latent has shape {latent.shape}")
        ids = request.token_ids or ()
        if not ids or any(not 0 <= token < self._size("vocab_size") or token == MEDIA_TOKEN for token in ids):
            raise ValueError(f"prompt ids lie in 0 to {self._size('vocab_size') - 1}, without {MEDIA_TOKEN}")
        places = np.full(len(media) // ROWS_PER_TOKEN, MEDIA_TOKEN, np.int32)
        span = MediaSpan(0, len(places), _digest(media))
        return PreparedPrompt(
            np.concatenate([places, np.asarray(ids, np.int32)]),
            inputs={"media": media, "latent": latent},
            media=(span,),
        )

    def plan_walks(self, prompt: PreparedPrompt, max_tokens: int) -> WalkPlan:
        plans = (PartitionPlan(MAIN, ("prefill", "speak", "paint")), PartitionPlan(AUDIO, ()))
        return WalkPlan(plans, {"speak_steps": max_tokens - 1})

    def vocab_size(self) -> int:
        return self._size("vocab_size")

    def _size(self, name: str) -> int:
        return int(self.setup.config[name])


def _digest(media: np.ndarray) -> bytes:
    """Of everything that the features depend on: the bytes, how they are read, and how they are prepared."""
    digest = hashlib.blake2b(media.tobytes(), digest_size=16)
    digest.update(repr((media.dtype.str, media.shape, ROWS_PER_TOKEN)).encode())
    return digest.digest()


def _floats(inputs: Mapping[str, Any], name: str) -> np.ndarray:
    if name not in inputs:
        raise ValueError(f"the request has no {name!r}")
    return np.ascontiguousarray(inputs[name], dtype=np.float32)
