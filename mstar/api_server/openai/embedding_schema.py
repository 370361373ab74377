"""Request schema of `/v1/embeddings`. Pure pydantic declarations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mstar.api_server.openai.completion_schema import TokenIds
from mstar.api_server.openai.fields import FIRST, MAX_INT, RequestFields, at_most
from mstar.api_server.openai.prompts import PROMPT_KINDS, prompt_kind

MAX_INPUTS = 2048
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS), FIRST, at_most(MAX_INPUTS, "inputs")]
ListsOfIds = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS), FIRST, at_most(MAX_INPUTS, "inputs")]


class EmbeddingRequest(RequestFields):
    """Texts whose embeddings are wanted. `input`: a text, its token ids, or a list of either."""

    input: Annotated[
        Annotated[str, Tag("a text")]
        | Annotated[TokenIds, Tag("token ids")]
        | Annotated[Texts, Tag("some texts")]
        | Annotated[ListsOfIds, Tag("lists of ids")],
        Discriminator(prompt_kind, custom_error_type="prompt_kind", custom_error_message=PROMPT_KINDS),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[
        int | None, Field(ge=1, le=MAX_INT, description="Only the model's own number, which is in /v1/models.")
    ] = None
