"""`POST /v1/responses`. Front loop only."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mstar.api_server.client_watch import unless_client_leaves
from mstar.api_server.front_state import FrontState, front_of, only_if_answered, request_id_of
from mstar.api_server.json_body import read_json
from mstar.api_server.openai.adapter import from_chat
from mstar.api_server.openai.chat_messages import chat_media
from mstar.api_server.openai.responses.answer_schema import ResponseAnswer
from mstar.api_server.openai.responses.chat import ChatOfResponse, chat_of
from mstar.api_server.openai.responses.run import ResponseRun, ResponseStream
from mstar.api_server.openai.responses.schema import ResponseRequest
from mstar.api_server.openapi import EVENTS, describe
from mstar.conductor.events import RefusedError

router = APIRouter(dependencies=[Depends(only_if_answered)])


@router.post("/v1/responses", **describe(ResponseRequest, "Respond to items", answer=ResponseAnswer, text=EVENTS))
async def responses(request: Request) -> Response:
    front = front_of(request)
    body = await read_json(request, ResponseRequest)
    front.check_model(body.model)
    chat = chat_of(body)
    try:
        return await _answer(request, front, body, chat)
    except RefusedError as refused:
        raise RefusedError(chat.renamed(refused.failure)) from None


async def _answer(request: Request, front: FrontState, body: ResponseRequest, chat: ChatOfResponse) -> Response:
    facts = front.handle.facts
    sources = chat_media(chat.chat.messages, facts.input_modalities)
    media = await unless_client_leaves(request.receive, front.media.load(sources)) if sources else ()
    asked = from_chat(chat.chat, facts, request_id_of(request), media)
    tokenizer, texts = front.text_side()
    run = ResponseRun(front.handle, body, chat, asked, tokenizer, texts)
    front.live.track((request_id_of(request), run.response_id), run.stream)
    is_handed_over = False
    try:
        run.watch_client(request.receive)
        if asked.is_streamed:
            response = ResponseStream(run, await run.first_events())
            is_handed_over = True
            return response
        return Response(await run.whole(), media_type="application/json")
    finally:
        if not is_handed_over:
            run.close()
