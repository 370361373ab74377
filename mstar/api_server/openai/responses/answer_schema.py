"""Schema of a whole response, for the OpenAPI document. Pure declarations."""

from __future__ import annotations

from typing import Any, Literal

from mstar.api_server.answer_schemas import Answer, ChatTokenLogprob, CompletionTokensDetails
from mstar.api_server.openai.responses.schema import Status


class OutputTextAnswer(Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatTokenLogprob]


class MessageAnswer(Answer):
    """What the model says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputTextAnswer]
    status: Status


class ReasoningTextAnswer(Answer):
    """The text of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningAnswer(Answer):
    """What the model thinks before."""

    id: str
    type: Literal["reasoning"]
    summary: list[None]
    content: list[ReasoningTextAnswer]
    status: Status


class CallAnswer(Answer):
    """A call of a function. `arguments`: JSON text of an object."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


class InputTokensDetails(Answer):
    """Of them, those that were not computed."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Answer):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(Answer):
    """Why a response was cut."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Answer):
    """A response. What was asked for is given back."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str] | None
    model: str
    output: list[MessageAnswer | ReasoningAnswer | CallAnswer]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    service_tier: str
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
