"""Request schema of `/v1/responses`. Pure pydantic declarations.

Says what a request of this route looks like; what a chat completion may have of it is checked when it becomes one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mstar.api_server.openai.chat_schema import (
    MAX_FUNCTION_NAME_CHARS,
    MAX_MESSAGES,
    MAX_TOOLS,
    TemplateVariables,
)
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

Status = Literal["in_progress", "completed", "incomplete"]
IgnoredList = Annotated[list[Any] | None, Field(description="Accepted, without effect.")]
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class TextContent(Schema):
    """A text in a message, written by a client or by an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: IgnoredList = None
    logprobs: IgnoredList = None


class ImageContent(Schema):
    """An image: a data URL, or an http(s) URL of a host that the server may fetch from."""

    type: Literal["input_image"]
    image_url: str
    detail: Annotated[Literal["auto"] | None, Field(description="Only auto.")] = None
    file_id: Unsupported = None


def _content_tag(part: Any) -> str:
    """The tags are no identifiers, so that no error's field name has them."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "an image" if kind == "input_image" else "a text"


Contents = Annotated[
    list[
        Annotated[
            Annotated[TextContent, Tag("a text")] | Annotated[ImageContent, Tag("an image")],
            Discriminator(_content_tag),
        ]
    ],
    FIRST,
]


class MessageItem(Schema):
    """A message of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Contents
    id: Ignored = None
    status: Status | None = None
    phase: Ignored = None


class CallItem(Schema):
    """A function that an earlier answer called. `arguments`: a JSON object, as text."""

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS)]
    arguments: str
    id: Ignored = None
    status: Status | None = None
    namespace: Unsupported = None
    caller: Unsupported = None


class CallOutputItem(Schema):
    """What a function gave back."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Contents
    id: Ignored = None
    status: Status | None = None


class ReasoningText(Schema):
    """A text of a reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Schema):
    """What an earlier answer thought, as text."""

    type: Literal["reasoning"]
    id: Ignored = None
    summary: Annotated[list[ReasoningText], FIRST] | None = None
    content: Annotated[list[ReasoningText], FIRST] | None = None
    encrypted_content: Unsupported = None
    status: Status | None = None


_ITEM_TAGS = {"function_call": "a call", "function_call_output": "an output", "reasoning": "a reasoning"}


def _item_tag(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    if kind in ("message", None):
        return "a message"
    return _ITEM_TAGS.get(kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a call")]
    | Annotated[CallOutputItem, Tag("an output")]
    | Annotated[ReasoningItem, Tag("a reasoning")],
    Discriminator(
        _item_tag,
        custom_error_type="item_kind",
        custom_error_message=f"an item is of the type message, {', '.join(_ITEM_TAGS)}",
    ),
]


class FunctionTool(Schema):
    """A function that the model may call. `parameters`: a JSON schema of its arguments, an object."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$", max_length=MAX_FUNCTION_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Schema):
    """The one function that the model has to call."""

    type: Literal["function"]
    name: str


class ResponseTextFormat(Schema):
    """Any text, a JSON object, or one that a JSON schema describes. `name`, `schema`, `description`, `strict`: of a
    schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextSettings(Schema):
    """What the answer's text is like."""

    format: ResponseTextFormat | None = None
    verbosity: Unsupported = None


class ReasoningSettings(Schema):
    """Models here think as their chat template has it; see `chat_template_kwargs`."""

    effort: Unsupported = None
    summary: Unsupported = None
    generate_summary: Unsupported = None


class ResponseStreamOptions(Schema):
    """Usage is always in the last event."""

    include_obfuscation: Annotated[Literal[False] | None, Field(description="Not supported.")] = None


class ResponseRequest(GenerationFields):
    """Body of a response. `input`: a user's text, or items: messages, earlier reasoning, calls and their outputs."""

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), FIRST, at_most(MAX_MESSAGES, "items")]
    )
    instructions: Annotated[str | None, Field(description="A system message before the input.")] = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Included], Field(max_length=MAX_PAIRS), FIRST] | None = None
    text: TextSettings | None = None
    tools: Annotated[Annotated[list[FunctionTool], FIRST] | None, at_most(MAX_TOOLS, "tools")] = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("a word")]
            | Annotated[FunctionChoice, Tag("a function")],
            Discriminator(lambda choice: "a function" if isinstance(choice, dict | FunctionChoice) else "a word"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    chat_template_kwargs: TemplateVariables = None

    metadata: Annotated[
        dict[str, str] | None, at_most(MAX_PAIRS, "entries"), Field(description="Given back, without effect.")
    ] = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Annotated[Literal[False] | None, Field(description="Nothing is stored.")] = None
    truncation: Literal["disabled"] | None = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    context_management: Unsupported = None
    conversation: Unsupported = None
    max_tokens: Unsupported = None  # pyright: ignore[reportIncompatibleVariableOverride]
    max_tool_calls: Unsupported = None
    n: Unsupported = None  # pyright: ignore[reportIncompatibleVariableOverride]
    previous_response_id: Annotated[
        None, Field(description="Not supported: nothing is stored. Send the earlier items in input.")
    ] = None
    prompt: Unsupported = None
    prompt_cache_retention: Unsupported = None
