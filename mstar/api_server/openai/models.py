"""`GET /v1/models` and `GET /v1/models/{id}`: what is served, and what it can do. Front loop only."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.api_server.answer_schemas import ModelAnswer, ModelsAnswer
from mstar.api_server.front_state import FrontState, front_of
from mstar.api_server.openapi import describe

router = APIRouter()
_OF_THE_CODE = ("title", "description")
"""Of a schema: its class's name and docstring, which are for readers of the code."""


@router.get("/v1/models", **describe(None, "List the served models", answer=ModelsAnswer))
async def list_models(request: Request) -> Response:
    front = front_of(request)
    body = {"object": "list", "data": [_entry(front, name) for name in front.listed_names]}
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.get("/v1/models/{model_id:path}", **describe(None, "Describe a model", answer=ModelAnswer))
async def get_model(request: Request, model_id: str) -> Response:
    front = front_of(request)
    front.check_model(model_id)
    return Response(msgspec.json.encode(_entry(front, model_id)), media_type="application/json")


def _entry(front: FrontState, name: str) -> dict[str, Any]:
    facts = front.handle.facts
    schema = facts.parameters.model_json_schema()
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "mstar",
        "root": front.served_names[0],
        "max_model_len": facts.max_seq_len,
        "modalities": {"input": facts.input_modalities, "output": facts.card.modalities_out},
        "endpoints": facts.card.endpoints,
        "embedding_size": facts.embedding_size,
        "capabilities": {
            "reasoning": facts.output_format.reasoning is not None,
            "tool_calls": facts.output_format.tool_calls is not None,
        },
        "parameters": {name: part for name, part in schema.items() if name not in _OF_THE_CODE},
    }
