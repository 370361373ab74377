"""`POST /tokenize` and `POST /detokenize`. Front loop only; tokenizing happens in the preprocess pool."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from mstar.api_server.answer_schemas import DetokenizeAnswer, TokenizeAnswer
from mstar.api_server.client_watch import unless_client_leaves
from mstar.api_server.errors import bad_request
from mstar.api_server.front_state import front_of
from mstar.api_server.json_body import read_json
from mstar.api_server.openai.chat_messages import conversation_of
from mstar.api_server.openai.chat_schema import Messages, TemplateVariables, Tools
from mstar.api_server.openai.fields import FIRST, Schema
from mstar.api_server.openai.request_media import media_of
from mstar.api_server.openapi import describe
from mstar.conductor.request import PromptInput

router = APIRouter()
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class TokenizeRequest(Schema):
    """A text, or a conversation, which goes through the chat template. `tools` and `chat_template_kwargs` as in a chat
    completion."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = None
    chat_template_kwargs: TemplateVariables = None


class DetokenizeRequest(Schema):
    """Token ids; special tokens are shown."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST]


@router.post("/tokenize", **describe(TokenizeRequest, "Token ids of a prompt", answer=TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    front = front_of(request)
    body = await read_json(request, TokenizeRequest)
    front.check_model(body.model)
    media = await media_of(request, body.messages or ())
    prompt = conversation_of(body, media) or PromptInput(kind="completion", text=body.prompt)
    tokens: list[int] = []
    if body.prompt != "":
        tokens = await unless_client_leaves(request.receive, front.handle.tokenize(prompt))
    answer = {"count": len(tokens), "max_model_len": front.handle.facts.max_seq_len, "tokens": tokens}
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/detokenize", **describe(DetokenizeRequest, "Text of token ids", answer=DetokenizeAnswer))
async def detokenize(request: Request) -> Response:
    front = front_of(request)
    body = await read_json(request, DetokenizeRequest)
    front.check_model(body.model)
    most = front.handle.facts.max_seq_len
    if len(body.tokens) > most:
        message = f"tokens: {len(body.tokens)} ids are more than the context of {most}."
        raise bad_request(message, "tokens", "context_length_exceeded")
    tokenizer, _ = front.text_side()
    text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
