"""From OpenAI's chat messages and tools to what a chat template takes. Pure; raises `RefusedError` naming the field.

What the schema cannot say is checked here: a message's fields against its role, and media against the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from mstar.api_server.errors import bad_request
from mstar.api_server.media import MediaSource
from mstar.api_server.openai.chat_schema import (
    CallFields,
    ChatMessageFields,
    ImagePart,
    TextPart,
    ToolFields,
    VideoPart,
)
from mstar.conductor.request import PromptInput
from mstar.model.base import ChatMessage, Content, MediaPart

CHAT_ROLES = {"developer": "system"}
ASSISTANTS_ONLY = ("tool_calls", "reasoning_content")
OF_MESSAGES = ("tools", "chat_template_kwargs")
"""Fields that say something about messages."""


class _Media(NamedTuple):
    """A part of a content that is no text, and where it stands."""

    kind: Literal["image", "video"]
    url: str
    where: str


def chat_media(messages: Sequence[ChatMessageFields], modalities: Sequence[str]) -> list[MediaSource]:
    """The URLs of all media, in written order.

    Raises:
        RefusedError: a model of these input `modalities` does not take one of them.
    """
    sources = []
    for index, message in enumerate(messages):
        for media in _media(message, index):
            if media.kind not in modalities:
                takes = " and ".join(modalities)
                raise bad_request(f"This model takes no {media.kind} as input, only {takes}.", f"{media.where}.type")
            if message.role not in ("user", "tool"):
                raise bad_request(f"A message of role {message.role} has no {media.kind}s.", f"{media.where}.type")
            sources.append(MediaSource(media.url, f"{media.where}.{media.kind}_url.url"))
    return sources


def chat_messages(messages: Sequence[ChatMessageFields], media: Sequence[bytes] = ()) -> tuple[ChatMessage, ...]:
    """Messages as a chat template sees them. `media`: the files that `chat_media` named."""
    files = iter(media)
    return tuple(_chat_message(message, index, files) for index, message in enumerate(messages))


def tool_mappings(tools: Sequence[ToolFields]) -> tuple[dict[str, Any], ...]:
    """Tools as a chat template sees them."""
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


class PromptOrMessages(Protocol):
    """A body whose prompt may be a conversation instead."""

    messages: list[ChatMessageFields] | None
    tools: list[ToolFields] | None
    chat_template_kwargs: dict[str, Any] | None

    @property
    def prompt(self) -> object: ...


def conversation_of(body: PromptOrMessages, media: Sequence[bytes]) -> PromptInput | None:
    """The body's conversation; None: it has a prompt. `media`: the files of its messages.

    Raises:
        RefusedError: 400, it has both or neither, or fields that need messages.
    """
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    if body.messages is None:
        for name in OF_MESSAGES:
            if getattr(body, name):
                raise bad_request(f"{name} needs messages.", name)
        return None
    return PromptInput(
        kind="chat",
        messages=chat_messages(body.messages, media),
        tools=tool_mappings(body.tools or ()),
        template_variables=body.chat_template_kwargs or {},
    )


def _media(message: ChatMessageFields, index: int) -> Iterator[_Media]:
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            where = f"messages[{index}].content[{number}]"
            match part:
                case ImagePart():
                    yield _Media("image", part.image_url.url, where)
                case VideoPart():
                    yield _Media("video", part.video_url.url, where)
                case _:
                    pass


def _chat_message(message: ChatMessageFields, index: int, files: Iterator[bytes]) -> ChatMessage:
    where = f"messages[{index}]"
    content = message.content
    if content is None and message.role != "assistant":
        raise bad_request(f"A {message.role} message needs content.", f"{where}.content")
    if content is None and not message.tool_calls and message.reasoning_content is None:
        raise bad_request("An assistant message needs content or tool_calls.", f"{where}.content")
    for name in ASSISTANTS_ONLY:
        if getattr(message, name) and message.role != "assistant":
            raise bad_request(f"Only an assistant message has {name}.", f"{where}.{name}")
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_request("A tool message needs tool_call_id.", f"{where}.tool_call_id")
    extra: dict[str, object] = {}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            extra[name] = value
    if message.tool_calls is not None:
        calls = message.tool_calls
        extra["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return ChatMessage(CHAT_ROLES.get(message.role, message.role), _content(content, files), extra)


def _content(content: str | Sequence[TextPart | ImagePart | VideoPart] | None, files: Iterator[bytes]) -> Content:
    """Texts beside each other are one text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str | MediaPart] = []
    for part in content:
        last = parts[-1] if parts else None
        match part:
            case TextPart() if isinstance(last, str):
                parts[-1] = last + part.text
            case TextPart():
                parts.append(part.text)
            case ImagePart():
                parts.append(MediaPart("image", next(files)))
            case VideoPart():
                parts.append(MediaPart("video", next(files)))
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return tuple(parts)


def _call(call: CallFields, where: str) -> dict[str, Any]:
    """Templates go through the arguments, so these are an object, not its text."""
    field = f"{where}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(f"{field} must be JSON.", field) from None
    if not isinstance(arguments, dict):
        raise bad_request(f"{field} must be a JSON object.", field)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
