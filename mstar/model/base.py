"""`Model`: the declaring half of a model. Imported by the front, the preprocess pool and launch; no torch here.

The tensor half (`submodules.py`, `network.py` of a model package) is named by import string in the `ModelCard` and is
imported on workers only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from mstar.communication.messages import MediaSpan
from mstar.graph.base import Walks
from mstar.streaming.topology import PartitionTopology

TEXT_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate")
"""Of a model that writes text."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Registry entry. `model` and `submodules` are import strings `package.module:attribute`; the latter is a callable
    `(node_name, SubmoduleContext) -> NodeSubmodule`. `architectures` are the config names that select this model.

    Two more import strings, each optional. `random_checkpoint`: `(size, directory, *, seed, progress) -> None`, which
    makes a checkpoint with random weights (`mstar make-checkpoint`). `published_config`: `(hub_id) -> mapping | None`,
    the `config.json` of a published checkpoint as this version knows it, for what is asked without a download."""

    name: str
    model: str
    submodules: str
    architectures: tuple[str, ...] = ()
    description: str = ""
    default_checkpoint: str = ""
    modalities_in: tuple[str, ...] = ("text",)
    modalities_out: tuple[str, ...] = ("text",)
    endpoints: tuple[str, ...] = TEXT_ENDPOINTS
    random_checkpoint: str = ""
    published_config: str = ""


AUTO_STEP_PATCHES = 2048
"""Of a tower of a thousand or so columns about as long as a chunk of a prompt."""


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What a model is built from: the checkpoint's config (as in `config.json`), the folder with `tokenizer.json` and
    the chat template (None: no text side), and the deployment's limits: tokens of a request, of one step of a media
    encoder patches times blocks, and pixels of all media of a request as they were sent (None: no limit)."""

    config: Mapping[str, Any]
    tokenizer_dir: Path | None
    max_seq_len: int
    max_step_patches: int = AUTO_STEP_PATCHES
    max_media_pixels: int | None = None


class MediaPart(NamedTuple):
    """Media in a message: `data` is the file as the client sent it, not yet decoded."""

    kind: Literal["image", "video"]
    data: bytes


Content = str | tuple[str | MediaPart, ...]
"""Text, or texts and media in written order."""


class ChatMessage(NamedTuple):
    """One message of a conversation as the chat template sees it. Content without media is one string."""

    role: str
    content: Content
    extra: Mapping[str, Any] = {}


class PromptFieldError(ValueError):
    """What is wrong with a prompt is in the request's field `field`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the context has room for, which is known before all of it is made."""


class Markers(NamedTuple):
    """Texts that enclose a part of an answer."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a chat model writes what is not its answer's text. `reasoning`: encloses what it thinks first. `tool_calls`:
    how it calls tools, None if it does not; `function_tags` is
    ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`` with line breaks between.
    Markers must be text when tokens are decoded: no special tokens, which are left out there."""

    reasoning: Markers | None = None
    tool_calls: Literal["function_tags"] | None = None


class NoParameters(BaseModel):
    """Parameter schema of a model without parameters of its own."""

    model_config = ConfigDict(extra="forbid")


PromptKind = Literal["chat", "completion", "native", "embedding"]
"""What a prompt is for. Of an `embedding` not the text's continuation is wanted, but what the model makes of it."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """Input of `process_prompt`. One of `messages`, `text` and `token_ids` is set (none for a model without text)."""

    kind: PromptKind
    messages: tuple[ChatMessage, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    parameters: BaseModel = field(default_factory=NoParameters)
    max_tokens: int = 16
    """Output tokens granted at most (after clamping to the context)."""
    continue_final_message: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    """Function tools that the model may call, as the request's JSON has them."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Further names that the chat template reads (`chat_template_kwargs`)."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Output of `process_prompt`: token ids int32 [n] (or None), tensors bound as persisted signals by name, and model
    facts for `next_walk` (`step_metadata`). `media`: which tokens stand for media, and a digest of everything that
    their features depend on; without it a prompt with tensor inputs shares no cached prefix. `opens_reasoning`: the
    prompt ends inside the reasoning, which the output continues."""

    token_ids: np.ndarray | None
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    step_metadata: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    media: tuple[MediaSpan, ...] = ()
    opens_reasoning: bool = False


class PartitionPlan(NamedTuple):
    """All walks of one partition, in order (empty for a stream-fed one)."""

    partition: str
    walks: tuple[str, ...]


class WalkPlan(NamedTuple):
    """The whole schedule of a request, known up front: the workers advance alone. `limits`: loop limits by name."""

    partitions: tuple[PartitionPlan, ...]
    limits: Mapping[str, int]


class WalkStep(NamedTuple):
    """The next walk of a partition, decided after the previous one. `limits`: loop limits by name, known from now on;
    those of this walk must be set by it or by an earlier step of the partition."""

    walk: str
    limits: Mapping[str, int] = {}


class Done(NamedTuple):
    """The partition has no further walk."""


class PartitionState(NamedTuple):
    """What `next_walk` decides on: walks done so far and the prompt's metadata."""

    walks_done: tuple[str, ...]
    step_metadata: Mapping[str, int | float | str | bool]


class Model(ABC):
    """One model, on the declaring side. Built once per process from a `ModelSetup`."""

    card: ModelCard

    def __init__(self, setup: ModelSetup) -> None:
        self.setup = setup

    @abstractmethod
    def walks(self) -> Walks:
        """The graph: what runs in each walk, by its name."""

    @abstractmethod
    def partitions(self) -> PartitionTopology:
        """Which walks make up each partition, and the streams between partitions."""

    @abstractmethod
    def get_node_resources(self) -> Sequence[Any]:
        """`NodeResourceSpec` per node with resources (typed loosely here: specs live in the engine's `spec.py`)."""

    @abstractmethod
    def process_prompt(self, request: PromptRequest) -> PreparedPrompt:
        """Runs in the preprocess pool. Raises `ValueError` with a message for the client (`PromptFieldError` where
        the field at fault is not the prompt itself)."""

    @abstractmethod
    def plan_walks(self, prompt: PreparedPrompt, max_tokens: int) -> WalkPlan | None:
        """The schedule, when it is known up front; None: `next_walk` is asked after each walk."""

    def next_walk(self, partition: str, state: PartitionState) -> WalkStep | Done:
        """Asked for the first walk of each partition that is not stream-fed, and after each walk until it says `Done`
        or the partition was ended by a node (`StopDecision.finish`) or by the client (a stop string)."""
        return Done()

    def parameter_schema(self) -> type[BaseModel]:
        """The model's own request parameters: validated before `process_prompt`, which gets them as `parameters`."""
        return NoParameters

    def reads_weight(self, node: str, name: str) -> bool:
        """Whether `node` loads the tensor of the checkpoint with this Hugging Face name: memory is planned with it."""
        return True

    def stop_token_ids(self) -> Sequence[int]:
        """End tokens of the model (chat end included)."""
        return ()

    def vocab_size(self) -> int:
        """Token ids are smaller; 0 for a model without text."""
        return 0

    def embedding_size(self) -> int | None:
        """Numbers of an embedding, for a model that answers prompts of the kind `embedding` with one emitted tensor of
        as many fp32 numbers and of length 1."""
        return None

    def output_format(self) -> OutputFormat:
        """How chat answers are taken apart."""
        return OutputFormat()

    def input_modalities(self) -> Sequence[str]:
        """What this checkpoint takes of what the card says."""
        return self.card.modalities_in
