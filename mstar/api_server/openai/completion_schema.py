"""Request schema of `/v1/completions`. Pure pydantic declarations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from mstar.api_server.openai.fields import (
    FIRST,
    MAX_CHOICES,
    MAX_LOGPROBS,
    GenerationFields,
    Unsupported,
    at_most,
)
from mstar.api_server.openai.prompts import PROMPT_KINDS, prompt_kind

MAX_PROMPTS = 512
"""Also the most choices that one request may have, over all its prompts."""
TokenIds = Annotated[list[int], Field(min_length=1), FIRST]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), FIRST, at_most(MAX_PROMPTS, "prompts")]
ListsOfIds = Annotated[
    list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), FIRST, at_most(MAX_PROMPTS, "prompts")
]


class CompletionRequest(GenerationFields):
    """Body of a text completion. `prompt`: a text, its token ids, or a list of either."""

    prompt: Annotated[
        Annotated[str, Tag("a text")]
        | Annotated[TokenIds, Tag("token ids")]
        | Annotated[Texts, Tag("some texts")]
        | Annotated[ListsOfIds, Tag("lists of ids")],
        Discriminator(prompt_kind, custom_error_type="prompt_kind", custom_error_message=PROMPT_KINDS),
    ]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES, description="Only equal to n.")] | None = None
    echo: Annotated[bool | None, Field(description="The text begins with the prompt's; not with logprobs.")] = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Unsupported = None
