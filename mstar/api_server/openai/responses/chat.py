"""From a response's request to the chat completion that answers it, and names of fields back again. Pure.

Items that belong to one turn of the assistant, its reasoning, its words and its calls, become one message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from mstar.api_server.errors import failure_of_validation
from mstar.api_server.openai.chat_schema import ChatRequest
from mstar.api_server.openai.fields import GenerationFields
from mstar.api_server.openai.responses.schema import (
    CallItem,
    CallOutputItem,
    FunctionChoice,
    FunctionTool,
    ImageContent,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
    ResponseTextFormat,
    TextContent,
)
from mstar.conductor.events import Failure, RefusedError

ENDS = (
    (re.compile(r"^max_(?:completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format(?:\.json_schema)?"), "text.format"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^(input.*)\.image_url\.url$"), r"\1.image_url"),
    (re.compile(r"^(input.*)\.tool_calls\[\d+\]\.function\.arguments$"), r"\1.arguments"),
)
_MESSAGE = re.compile(r"^messages\[(\d+)\](\.content)?")


class Origin(NamedTuple):
    """Where a message came from: the field, and that of its content."""

    field: str
    content: str


class ChatOfResponse(NamedTuple):
    """`origins[i]`: of message i; it is that of the first item, where a message is several."""

    chat: ChatRequest
    origins: Sequence[Origin]

    def renamed(self, failure: Failure) -> Failure:
        """A failure of the chat, in words of the response's request."""
        return _renamed(failure, self.origins)


def chat_of(body: ResponseRequest) -> ChatOfResponse:
    """Raises `RefusedError` (400) for what a chat completion refuses, naming the response's field."""
    messages, origins = _messages(body)
    same = GenerationFields.model_fields.keys() - {"stream_options"}
    fields: dict[str, Any] = {name: value for name in same if (value := getattr(body, name)) is not None}
    fields["messages"] = messages
    fields["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.tools is not None:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    fields["parallel_tool_calls"] = body.parallel_tool_calls
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    try:
        return ChatOfResponse(ChatRequest.model_validate(fields), origins)
    except ValidationError as error:
        raise RefusedError(_renamed(failure_of_validation(error), origins)) from None


def _renamed(failure: Failure, origins: Sequence[Origin]) -> Failure:
    if failure.param is None:
        return failure

    def item(match: re.Match[str]) -> str:
        origin = origins[int(match[1])]
        return origin.content if match[2] else origin.field

    name = "input" if failure.param == "messages" else _MESSAGE.sub(item, failure.param)
    for pattern, replacement in ENDS:
        name = pattern.sub(replacement, name)
    message = failure.message.replace(failure.param, name).replace("max_completion_tokens", "max_output_tokens")
    return failure._replace(param=name, message=message)


def _messages(body: ResponseRequest) -> tuple[list[dict[str, Any]], list[Origin]]:
    messages: list[dict[str, Any]] = []
    origins: list[Origin] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
        origins.append(Origin("instructions", "instructions"))
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}], [*origins, Origin("input", "input")]
    turn: dict[str, Any] | None = None
    for index, item in enumerate(body.input):
        if not _continues(turn, item):
            turn = _message(item)
            messages.append(turn)
            content = "output" if isinstance(item, CallOutputItem) else "content"
            origins.append(Origin(f"input[{index}]", f"input[{index}].{content}"))
            turn = turn if turn["role"] == "assistant" else None
        elif turn is not None:
            _add(turn, item)
    return messages, origins


def _continues(turn: dict[str, Any] | None, item: object) -> bool:
    """Whether an item belongs to the assistant's turn that is open."""
    if turn is None:
        return False
    if isinstance(item, CallItem):
        return True
    return isinstance(item, MessageItem) and item.role == "assistant" and set(turn) == {"role", "reasoning_content"}


def _add(turn: dict[str, Any], item: object) -> None:
    if isinstance(item, CallItem):
        turn.setdefault("tool_calls", []).append(_call(item))
    elif isinstance(item, MessageItem):
        turn["content"] = _content(item.content)


def _message(item: object) -> dict[str, Any]:
    match item:
        case MessageItem():
            return {"role": item.role, "content": _content(item.content)}
        case CallItem():
            return {"role": "assistant", "tool_calls": [_call(item)]}
        case CallOutputItem():
            return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
        case ReasoningItem():
            texts = item.content or item.summary or ()
            return {"role": "assistant", "reasoning_content": "\n".join(text.text for text in texts)}
        case _:
            raise TypeError(f"{type(item).__name__} is no item")


def _content(content: str | Sequence[TextContent | ImageContent]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextContent)
        else {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        for part in content
    ]


def _call(item: CallItem) -> dict[str, Any]:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def _tool_choice(choice: str | FunctionChoice | None) -> Any:
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(form: ResponseTextFormat) -> dict[str, Any]:
    schema = form.model_dump(exclude_none=True, exclude={"type"}, by_alias=True)
    if form.type == "json_schema" or schema:
        return {"type": form.type, "json_schema": schema}
    return {"type": form.type}
