"""`POST /generate`. Front loop only."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mstar.api_server.answer_schemas import GenerateAnswer
from mstar.api_server.client_watch import unless_client_leaves
from mstar.api_server.front_state import front_of, new_id, only_if_answered, request_id_of
from mstar.api_server.generate.request import from_generate
from mstar.api_server.generate.run import GenerateRun, GenerateStream
from mstar.api_server.generate.schema import GenerateBody
from mstar.api_server.json_body import read_json
from mstar.api_server.openai.chat_messages import chat_media
from mstar.api_server.openapi import EVENTS, describe

router = APIRouter(dependencies=[Depends(only_if_answered)])


@router.post(
    "/generate",
    **describe(GenerateBody, "What the model emits, as typed events", answer=GenerateAnswer, text=EVENTS),
)
async def generate(request: Request) -> Response:
    front = front_of(request)
    body = await read_json(request, GenerateBody)
    front.check_model(body.model)
    facts = front.handle.facts
    sources = chat_media(body.messages or (), facts.input_modalities)
    media = await unless_client_leaves(request.receive, front.media.load(sources)) if sources else ()
    asked = from_generate(body, facts, request_id_of(request), media)
    run = GenerateRun(front.handle, asked, front.tokenizer, new_id("gen-"))
    front.live.track((request_id_of(request), run.run_id), run.stream)
    is_handed_over = False
    try:
        run.watch_client(request.receive)
        if asked.is_streamed:
            response = GenerateStream(run, await run.first_events())
            is_handed_over = True
            return response
        return Response(await run.whole(), media_type="application/json")
    finally:
        if not is_handed_over:
            run.close()
