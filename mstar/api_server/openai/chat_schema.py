"""Request schema of `/v1/chat/completions`. Pure pydantic declarations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

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
MAX_FUNCTION_NAME_CHARS = 128


PART_TAGS = {"text": "a text", "image_url": "an image", "video_url": "a video"}
MAX_KIND_CHARS = 40
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Of a chat template: the server sets them itself."""


def _known_kind(kind: Any) -> Any:
    if isinstance(kind, str) and kind not in PART_TAGS:
        raise ValueError(f"a part of a content is {', '.join(PART_TAGS)}, not {kind[:MAX_KIND_CHARS]!r}")
    return kind


class TextPart(Schema):
    """A text as part of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(_known_kind)]
    text: str


def _url_in_an_object(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("it must be an object with url, not the URL itself")
    return value


class ImageUrl(Schema):
    """A data URL, or an http(s) URL of a host that the server may fetch from."""

    url: str
    detail: Annotated[Literal["auto"] | None, Field(description="Only auto.")] = None


class ImagePart(Schema):
    """An image as part of a message's content."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(_url_in_an_object)]


class VideoUrl(Schema):
    """As an image's."""

    url: str


class VideoPart(Schema):
    """A video as part of a message's content."""

    type: Literal["video_url"]
    video_url: Annotated[VideoUrl, BeforeValidator(_url_in_an_object)]


def _part_tag(part: Any) -> str:
    """What is no part at all is looked at as a text, whose schema says what is wrong with it. The tags are no
    identifiers, so that no error's field name has them."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return PART_TAGS.get(kind, "a text") if isinstance(kind, str) else "a text"


Part = Annotated[
    Annotated[TextPart, Tag("a text")] | Annotated[ImagePart, Tag("an image")] | Annotated[VideoPart, Tag("a video")],
    Discriminator(_part_tag),
]


class CalledFunction(Schema):
    """`arguments`: a JSON object, as text."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS)]
    arguments: str


class CallFields(Schema):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Annotated[int | None, Field(description="Accepted, without effect.")] = None


class ChatMessageFields(Schema):
    """One message. Content is null only for an assistant; parts of text equal their texts, joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], FIRST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallFields], FIRST] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Ignored = None
    annotations: Annotated[list[Any] | None, Field(description="Accepted, without effect.")] = None
    audio: Unsupported = None
    function_call: Unsupported = None


class FunctionFields(Schema):
    """`parameters`: a JSON schema of its arguments, an object."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$", max_length=MAX_FUNCTION_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(description="The arguments of every call are valid by `parameters`.")] = None


class ToolFields(Schema):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionFields


class FunctionName(Schema):
    """Of one of the request's tools."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS)]


class NamedTool(Schema):
    """The answer is a call of this tool."""

    type: Literal["function"]
    function: FunctionName


def _refuse_reserved(variables: Any) -> Any:
    if isinstance(variables, dict) and (taken := sorted(RESERVED_VARIABLES & variables.keys())):
        raise ValueError(f"{taken[0]} is set by the server, from the request's own fields")
    return variables


Tools = Annotated[
    Annotated[list[ToolFields], FIRST] | None,
    at_most(MAX_TOOLS, "tools"),
    Field(description="Functions that the model may call; where it calls none, only with tool_choice none."),
]
TemplateVariables = Annotated[
    dict[str, Any] | None,
    at_most(MAX_PAIRS, "entries"),
    BeforeValidator(_refuse_reserved),
    Field(description="Further variables of the model's chat template, such as enable_thinking."),
]


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


def _known_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise ValueError("of the choices that are objects only one function, by its name, is served")
    if not isinstance(choice, dict | None) and choice not in ("none", "auto", "required"):
        raise ValueError("it must be none, auto, required or a function by its name")
    return choice


def _choice_tag(choice: Any) -> str:
    return "a function" if isinstance(choice, dict | NamedTool) else "a word"


ToolChoice = Annotated[
    Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("a word")] | Annotated[NamedTool, Tag("a function")],
        Discriminator(_choice_tag),
    ]
    | None,
    BeforeValidator(_known_choice),
    Field(description="required: nothing but calls; a function by its name: one call of it."),
]
FORMAT_TAGS = {"text": "any text", "json_object": "a JSON object", "json_schema": "JSON by a schema"}


class TextFormat(Schema):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Schema):
    """A JSON object, whatever is in it."""

    type: Literal["json_object"]


class NamedSchema(Schema):
    """`strict` may say what it likes: the schema always holds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=MAX_FUNCTION_NAME_CHARS)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Schema):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _format_tag(form: Any) -> str:
    """As `_part_tag`: what is no format is looked at as a text."""
    kind = form.get("type") if isinstance(form, dict) else getattr(form, "type", None)
    return FORMAT_TAGS.get(kind, "any text") if isinstance(kind, str) else "any text"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("any text")]
    | Annotated[JsonObjectFormat, Tag("a JSON object")]
    | Annotated[JsonSchemaFormat, Tag("JSON by a schema")],
    Discriminator(_format_tag),
]


class ChatRequest(GenerationFields):
    """Body of a chat completion."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1), FIRST] | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: at most one call.")] = None
    chat_template_kwargs: TemplateVariables = None
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
