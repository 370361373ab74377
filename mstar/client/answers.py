"""What the server answers, typed: the JSON of each route as structs. Pure; fields that are not here are left out."""

from __future__ import annotations

from typing import Any

import msgspec


class Struct(msgspec.Struct, frozen=True):
    """Base of all answers: read-only."""


class PromptDetails(Struct, frozen=True):
    """`cached_tokens`: of the prompt, taken from the prefix cache."""

    cached_tokens: int = 0


class CompletionDetails(Struct, frozen=True):
    """`reasoning_tokens`: of the completion, thought and not said."""

    reasoning_tokens: int = 0


class Usage(Struct, frozen=True):
    """Tokens of one request, over all its prompts and choices."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class CalledFunction(Struct, frozen=True):
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """One call that the model makes."""

    id: str
    function: CalledFunction
    type: str = "function"

    def arguments(self) -> dict[str, Any]:
        """The arguments, parsed."""
        return msgspec.json.decode(self.function.arguments, type=dict[str, Any])


class ChatMessage(Struct, frozen=True):
    """An assistant's message."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    role: str = "assistant"

    def as_request(self) -> dict[str, Any]:
        """As an entry of `messages` of the next request."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = msgspec.to_builtins(self.tool_calls)
        return message


class TopLogprob(Struct, frozen=True):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(Struct, frozen=True):
    """A sampled token, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


class ChatLogprobs(Struct, frozen=True):
    """Of the tokens of a choice."""

    content: tuple[TokenLogprob, ...] | None = None


class ChatChoice(Struct, frozen=True):
    """`finish_reason`: stop, length or tool_calls."""

    index: int
    message: ChatMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct, frozen=True):
    """Answer of a chat. The properties are of its first choice."""

    id: str
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage | None = None

    @property
    def message(self) -> ChatMessage:
        return self.choices[0].message

    @property
    def text(self) -> str:
        return self.message.content or ""

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason


class CompletionLogprobs(Struct, frozen=True):
    """Columns over the tokens of a choice."""

    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None
    text_offset: tuple[int, ...] = ()


class CompletionChoice(Struct, frozen=True):
    """`index` counts over all prompts of the request."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class Completion(Struct, frozen=True):
    """Answer of a text completion. `text` is of its first choice."""

    id: str
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text


class Modalities(Struct, frozen=True):
    """What goes in and what comes out: text, image, video and so on."""

    input: tuple[str, ...] = ("text",)
    output: tuple[str, ...] = ("text",)


class ModelEntry(Struct, frozen=True):
    """A served model. `parameters`: JSON schema of its own request parameters; `capabilities`: by name.
    `embedding_size`: numbers of an embedding, where it makes any."""

    id: str
    max_model_len: int | None = None
    root: str | None = None
    embedding_size: int | None = None
    modalities: Modalities = Modalities()
    endpoints: tuple[str, ...] = ()
    capabilities: dict[str, Any] = {}
    parameters: dict[str, Any] = {}


class ModelList(Struct, frozen=True):
    """Answer of `/v1/models`."""

    data: tuple[ModelEntry, ...]


class Tokens(Struct, frozen=True):
    """Answer of `/tokenize`."""

    tokens: list[int]


class DetokenizedText(Struct, frozen=True):
    """Answer of `/detokenize`."""

    prompt: str


class Status(Struct, frozen=True):
    """Answer of the health routes: a word, or why not."""

    status: str


class Aborted(Struct, frozen=True):
    """Answer of `DELETE /v1/requests/{request_id}`: how many requests had that id."""

    aborted: int
