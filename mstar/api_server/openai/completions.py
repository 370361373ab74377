"""`POST /v1/chat/completions` and `POST /v1/completions`. Front loop only."""

from __future__ import annotations

import time

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mstar.api_server.answer_schemas import ChatAnswer, CompletionAnswer
from mstar.api_server.front_state import front_of, new_id, only_if_answered, request_id_of
from mstar.api_server.json_body import read_json
from mstar.api_server.openai.adapter import TextRequest, from_chat, from_completion
from mstar.api_server.openai.chat_schema import ChatRequest
from mstar.api_server.openai.completion_schema import CompletionRequest
from mstar.api_server.openai.request_media import media_of
from mstar.api_server.openai.run_response import response_of
from mstar.api_server.openai.shapes import ChatShape, CompletionShape, ResponseShape
from mstar.api_server.openai.text_run import TextRun
from mstar.api_server.openapi import EVENTS, describe

router = APIRouter(dependencies=[Depends(only_if_answered)])


@router.post(
    "/v1/chat/completions",
    **describe(ChatRequest, "Answer a conversation", answer=ChatAnswer, text=EVENTS),
)
async def chat_completions(request: Request) -> Response:
    front = front_of(request)
    body = await read_json(request, ChatRequest)
    front.check_model(body.model)
    media = await media_of(request, body.messages)
    asked = from_chat(body, front.handle.facts, request_id_of(request), media)
    return await _answer(request, asked, ChatShape, "chatcmpl-")


@router.post(
    "/v1/completions",
    **describe(CompletionRequest, "Continue a text", answer=CompletionAnswer, text=EVENTS),
)
async def completions(request: Request) -> Response:
    front = front_of(request)
    body = await read_json(request, CompletionRequest)
    front.check_model(body.model)
    asked = from_completion(body, front.handle.facts, request_id_of(request))
    return await _answer(request, asked, CompletionShape, "cmpl-")


async def _answer(request: Request, asked: TextRequest, kind: type[ResponseShape], id_prefix: str) -> Response:
    front = front_of(request)
    tokenizer, texts = front.text_side()
    response_id = new_id(id_prefix)
    shape = kind(
        response_id=response_id,
        created=int(time.time()),
        model=asked.model,
        num_results=asked.generate.num_results,
        num_logprobs=asked.num_logprobs,
        texts=texts,
        includes_usage=asked.includes_usage,
    )
    run = TextRun(front.handle, asked, shape, tokenizer)
    return await response_of(request, run, response_id)
