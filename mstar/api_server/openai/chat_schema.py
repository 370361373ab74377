"""Request schema of `/v1/chat/completions`. Pure pydantic declarations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mstar.api_server.openai.fields import (
    FIRST,
    MAX_INT,
    MAX_LOGPROBS,
    MAX_PAIRS,
    GenerationFields,
    Ignored,
    Schema,
    Unsupported,
    at_most,
)

MAX_MESSAGES = 4096
MAX_PARTS = 16384
"""Of the contents of all messages together."""
MAX_TOOLS = 1024


class TextPart(Schema):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessageFields(Schema):
    """One message. Content is null only for an assistant; parts equal their texts, joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FIRST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], FIRST] | None = None
    tool_call_id: str | None = None
    refusal: Ignored = None
    annotations: Annotated[list[Any] | None, Field(description="Accepted, without effect.")] = None
    audio: Unsupported = None
    function_call: Unsupported = None


def _bound_parts(messages: Any) -> Any:
    """Refuses too many parts in all before any is validated."""
    if isinstance(messages, list):
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > MAX_PARTS:
            raise ValueError(f"their contents have {num_parts} parts, but at most {MAX_PARTS} are allowed")
    return messages


Messages = Annotated[
    list[ChatMessageFields],
    Field(min_length=1, max_length=MAX_MESSAGES),
    FIRST,
    BeforeValidator(_bound_parts),
    at_most(MAX_MESSAGES, "messages"),
]


class TextFormat(Schema):
    """The only response format that there is."""

    type: Literal["text"]


class ChatRequest(GenerationFields):
    """Body of a chat completion."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1), FIRST] | None = None
    tools: Annotated[
        Annotated[list[dict[str, Any]], FIRST] | None,
        at_most(MAX_TOOLS, "tools"),
        Field(description="Only with tool_choice none."),
    ] = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    continue_final_message: Annotated[
        bool | None, Field(description="Go on with the last message, an assistant's, instead of answering it.")
    ] = None

    metadata: Annotated[
        dict[str, str] | None, at_most(MAX_PAIRS, "entries"), Field(description="Accepted, without effect.")
    ] = None
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
