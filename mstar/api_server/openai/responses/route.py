"""`POST /v1/responses`. Front loop only."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mstar.api_server.front_state import front_of, only_if_answered, request_id_of
from mstar.api_server.json_body import read_json
from mstar.api_server.openai.adapter import from_chat
from mstar.api_server.openai.request_media import media_of
from mstar.api_server.openai.responses.answer_schema import ResponseAnswer
from mstar.api_server.openai.responses.chat import ChatOfResponse, chat_of
from mstar.api_server.openai.responses.run import ResponseRun
from mstar.api_server.openai.responses.schema import ResponseRequest
from mstar.api_server.openai.run_response import response_of
from mstar.api_server.openapi import EVENTS, describe
from mstar.conductor.events import RefusedError

router = APIRouter(dependencies=[Depends(only_if_answered)])


@router.post("/v1/responses", **describe(ResponseRequest, "Respond to items", answer=ResponseAnswer, text=EVENTS))
async def responses(request: Request) -> Response:
    body = await read_json(request, ResponseRequest)
    front_of(request).check_model(body.model)
    chat = chat_of(body)
    try:
        return await _answer(request, body, chat)
    except RefusedError as refused:
        raise RefusedError(chat.renamed(refused.failure)) from None


async def _answer(request: Request, body: ResponseRequest, chat: ChatOfResponse) -> Response:
    front = front_of(request)
    media = await media_of(request, chat.chat.messages)
    asked = from_chat(chat.chat, front.handle.facts, request_id_of(request), media)
    tokenizer, texts = front.text_side()
    run = ResponseRun(front.handle, body, chat, asked, tokenizer, texts)
    return await response_of(request, run, run.response_id)
