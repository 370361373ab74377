"""`POST /generate`. Front loop only."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mstar.api_server.answer_schemas import GenerateAnswer
from mstar.api_server.front_state import front_of, new_id, only_if_answered, request_id_of
from mstar.api_server.generate.request import from_generate
from mstar.api_server.generate.run import GenerateRun
from mstar.api_server.generate.schema import GenerateBody
from mstar.api_server.json_body import read_json
from mstar.api_server.openai.request_media import media_of
from mstar.api_server.openai.run_response import response_of
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
    media = await media_of(request, body.messages or ())
    asked = from_generate(body, front.handle.facts, request_id_of(request), media)
    run = GenerateRun(front.handle, asked, front.tokenizer, new_id("gen-"))
    return await response_of(request, run, run.run_id)
