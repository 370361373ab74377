"""Request schema of `/v1/completions`. Pure pydantic declarations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mstar.api_server.openai.fields import MAX_CHOICES, MAX_LOGPROBS, GenerationFields, Unsupported

MAX_PROMPTS = 256
TokenIds = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(GenerationFields):
    """Body of a text completion. `prompt`: a text, its token ids, or a list of either."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES, description="Only equal to n.")] | None = None
    echo: Literal[False] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Unsupported = None
