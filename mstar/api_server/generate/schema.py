"""Request schema of `/generate`. Pure pydantic declarations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from mstar.api_server.openai.chat_schema import Messages, TemplateVariables, Tools
from mstar.api_server.openai.completion_schema import TokenIds
from mstar.api_server.openai.fields import MAX_LOGPROBS, GenerationFields, Unsupported
from mstar.api_server.openai.prompts import prompt_kind

PROMPT_KINDS = "it must be a text or token ids, and not empty"


class GenerateBody(GenerationFields):
    """One prompt: a text, its token ids, or a conversation, which goes through the chat template. What comes back is
    what the model emits: reasoning and calls are not taken apart."""

    prompt: (
        Annotated[
            Annotated[str, Field(min_length=1), Tag("a text")] | Annotated[TokenIds, Tag("token ids")],
            Discriminator(prompt_kind, custom_error_type="prompt_kind", custom_error_message=PROMPT_KINDS),
        ]
        | None
    ) = None
    messages: Messages | None = None
    tools: Annotated[Tools, Field(description="As the chat template shows them; needs messages.")] = None
    chat_template_kwargs: TemplateVariables = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: Unsupported = None  # pyright: ignore[reportIncompatibleVariableOverride]
