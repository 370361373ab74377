"""Request schema of `/v1/chat/completions`. Pure pydantic declarations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mstar.api_server.openai.fields import MAX_INT, MAX_LOGPROBS, GenerationFields, Ignored, Schema, Unsupported


class TextPart(Schema):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessageFields(Schema):
    """One message. Content is null only for an assistant; parts equal their texts, joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: Ignored = None
    annotations: Annotated[list[Any] | None, Field(description="Accepted, without effect.")] = None
    audio: Unsupported = None
    function_call: Unsupported = None


class TextFormat(Schema):
    """The only response format that there is."""

    type: Literal["text"]


class ChatRequest(GenerationFields):
    """Body of a chat completion."""

    messages: Annotated[list[ChatMessageFields], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    tools: Annotated[list[dict[str, Any]] | None, Field(description="Only with tool_choice none.")] = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    continue_final_message: Annotated[
        bool | None, Field(description="Go on with the last message, an assistant's, instead of answering it.")
    ] = None

    metadata: Annotated[dict[str, str] | None, Field(description="Accepted, without effect.")] = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
