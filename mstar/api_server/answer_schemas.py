"""Schemas of whole answers, for the OpenAPI document. Pure declarations: answers are written by hand, not by these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of every answer: it has no other fields."""

    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(Answer):
    """Of them, those that were not computed."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Of them, those of the reasoning."""

    reasoning_tokens: int


class UsageAnswer(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TokenLogprob(Answer):
    """A token, and the bytes of its text."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A token of the answer with the likeliest ones beside it."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """Of a chat's choice."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunctionAnswer(Answer):
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


class ToolCallAnswer(Answer):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class ChatMessageAnswer(Answer):
    """What the model answers. Content is null only beside calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoiceAnswer(Answer):
    """One of `n` answers."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(Answer):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceAnswer]
    usage: UsageAnswer


class CompletionLogprobs(Answer):
    """Of a text's choice, in parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoiceAnswer(Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(Answer):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoiceAnswer]
    usage: UsageAnswer


class EmbeddingEntry(Answer):
    """One vector: numbers, or base64 of them."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    """Vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


class Modalities(Answer):
    """What goes in and what comes out."""

    input: list[str]
    output: list[str]


class Capabilities(Answer):
    """Whether the model tells its reasoning apart, and calls tools."""

    reasoning: bool
    tool_calls: bool


class ModelAnswer(Answer):
    """A served model. `parameters`: the JSON schema of the model's own parameters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    modalities: Modalities
    endpoints: list[str]
    embedding_size: int | None
    capabilities: Capabilities
    parameters: dict[str, Any]


class ModelsAnswer(Answer):
    """The served names, without addresses of files that are names too."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(Answer):
    """Token ids, and how many a request may have."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Answer):
    """A text."""

    prompt: str


class IdLogprob(Answer):
    """A token by its id."""

    token: int
    logprob: float


class EmittedLogprob(IdLogprob):
    """A token that was written, with the likeliest ones beside it."""

    top: list[IdLogprob]


class EmittedTensor(Answer):
    """`data`: base64 of little-endian numbers."""

    signal: str
    modality: str
    dtype: str
    shape: list[int]
    data: str


class GenerateChoiceAnswer(Answer):
    """Everything that one choice emitted."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[EmittedLogprob] | None
    tensors: list[EmittedTensor]
    finish_reason: Literal["stop", "length"]


class GenerateAnswer(Answer):
    """What the model emitted."""

    id: str
    model: str
    choices: list[GenerateChoiceAnswer]
    usage: UsageAnswer


class StatusAnswer(Answer):
    """One word, or what is wrong."""

    status: str


class VersionAnswer(Answer):
    """Of the server."""

    version: str


class AbortAnswer(Answer):
    """How many running requests had the id."""

    id: str
    object: Literal["request"]
    aborted: int
